"""Digests for the codes, scales and maxima that the PyTorch reference computes for a table of matrices.

Run as a program it compares them with JAX's results on this machine, without torch, and prints the different ones as
JSON. --write stores the torch reference digests; --few uses one spec per scale layout.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.jax.bits import NUMPY_DTYPES, erase_nan_signs, jax_bytes, matrix, to_torch, torch_bytes
from transformer_engine.common.formats import (
    BLOCK_1D,
    BLOCK_2D,
    E2M1,
    E4M3,
    E5M2,
    FLOAT8,
    MXFP8,
    NVFP4,
)
from transformer_engine.common.quantize_spec import QuantizeSpec
from transformer_engine.jax.primitives import quantize

FILE = Path(__file__).with_suffix(".json")
BOTH = {"rowwise": True, "columnwise": True}
SPECS = {
    "float8-e4m3": QuantizeSpec(FLOAT8, E4M3, **BOTH),
    "float8-e5m2": QuantizeSpec(FLOAT8, E5M2, **BOTH),
    "float8-power-of-two": QuantizeSpec(FLOAT8, E4M3, **BOTH, power_of_two=True, epsilon=1e-3),
    "block1d": QuantizeSpec(BLOCK_1D, E4M3, **BOTH),
    "block1d-power-of-two": QuantizeSpec(BLOCK_1D, E4M3, **BOTH, power_of_two=True),
    "block2d": QuantizeSpec(BLOCK_2D, E4M3, **BOTH),
    "block2d-power-of-two": QuantizeSpec(BLOCK_2D, E5M2, **BOTH, power_of_two=True),
    "mxfp8-e4m3": QuantizeSpec(MXFP8, E4M3, **BOTH),
    "mxfp8-e5m2": QuantizeSpec(MXFP8, E5M2, **BOTH),
    "mxfp8-2d": QuantizeSpec(MXFP8, E4M3, **BOTH, two_dimensional=True),
    "nvfp4": QuantizeSpec(NVFP4, E2M1, **BOTH),
    "nvfp4-2d": QuantizeSpec(NVFP4, E2M1, **BOTH, two_dimensional=True),
    "nvfp4-hadamard": QuantizeSpec(NVFP4, E2M1, **BOTH, hadamard=True),
    "nvfp4-hadamard-unsigned": QuantizeSpec(NVFP4, E2M1, **BOTH, hadamard=True, random_sign=False),
    "nvfp4-stochastic": QuantizeSpec(NVFP4, E2M1, **BOTH, stochastic=True),
    "nvfp4-2d-stochastic": QuantizeSpec(NVFP4, E2M1, **BOTH, two_dimensional=True, stochastic=True),
}
# Compared in every run. test_quantize_bits.py always compares the Hadamard transform with torch's.
FEW = ("float8-e4m3", "block2d", "mxfp8-2d", "nvfp4")
STORED_KINDS, STORED_SHAPE, STORED_DTYPE = (
    ("spread", "special", "large", "zero"),
    (144, 130),
    "bfloat16",
)


def fits(spec: QuantizeSpec, shape: tuple[int, int]) -> bool:
    if spec.format == NVFP4 and spec.columnwise:
        return shape[0] % (16 if spec.hadamard else 2) == 0
    return True


def random_numbers(
    spec: QuantizeSpec, shape: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray] | None:
    if not spec.stochastic:
        return None
    rng = np.random.default_rng(1)
    return rng.random(shape, np.float32), rng.random(shape[::-1], np.float32)


@functools.cache
def program(spec: QuantizeSpec):
    """One quantization as a program, compiled once for a shape."""
    return jax.jit(
        lambda x, scale, random: quantize.quantize(x, spec, multiplier=scale, random=random)
    )


def digest_cases() -> Iterator[tuple[str, QuantizeSpec, np.ndarray]]:
    """Every case with a digest, as (name, spec, matrix)."""
    for name, spec in SPECS.items():
        for seed, kind in enumerate(STORED_KINDS):
            if fits(spec, STORED_SHAPE):
                yield f"{name} {kind}", spec, matrix(kind, STORED_SHAPE, STORED_DTYPE, seed)


def quantized(spec: QuantizeSpec, x: np.ndarray) -> Any:
    """Quantize a matrix with JAX in one program."""
    random = random_numbers(spec, x.shape)
    return program(spec)(
        jnp.asarray(x), None, None if random is None else tuple(map(jnp.asarray, random))
    )


@functools.cache
def shapes_and_dtypes(spec: QuantizeSpec) -> Any:
    """Shapes and dtypes for a quantized matrix from the table."""
    x = jax.ShapeDtypeStruct(STORED_SHAPE, NUMPY_DTYPES[STORED_DTYPE])
    return jax.eval_shape(functools.partial(quantized, spec), x)


def digest(parts: dict[str, tuple[np.ndarray, Any]]) -> str:
    """Of {field: (bytes, dtype)}; NaNs count as equal whatever their sign and payload."""
    result = hashlib.sha256()
    for name, (data, dtype) in parts.items():
        result.update(name.encode())
        result.update(np.ascontiguousarray(erase_nan_signs(data, dtype)).tobytes())
    return result.hexdigest()[:16]


def jax_digest(result: Any) -> str:
    fields = {name: getattr(result, name) for name in result._fields}
    return digest({name: (jax_bytes(x), x.dtype) for name, x in fields.items() if x is not None})


def torch_quantize(spec: QuantizeSpec, x: np.ndarray, scale: float | None = None) -> Any:
    """Quantize a matrix with the PyTorch reference."""
    import torch

    from transformer_engine.common.dispatch import use_backend
    from transformer_engine.pytorch.primitives import quantize as theirs

    random = random_numbers(spec, x.shape)
    with use_backend(quantize="reference"):
        return theirs.quantize(
            to_torch(x),
            theirs.QuantizeSpec(
                **{name: getattr(spec, name) for name in spec.__dataclass_fields__}
            ),
            multiplier=None if scale is None else torch.full((1,), scale),
            random=None if random is None else tuple(map(torch.from_numpy, random)),  # pyright: ignore
        )


def torch_digests() -> dict[str, str]:
    results = {}
    for name, spec, x in digest_cases():
        result, dtypes = torch_quantize(spec, x), shapes_and_dtypes(spec)
        fields = {field: getattr(result, field) for field in result._fields}
        results[name] = digest(
            {
                field: (torch_bytes(part), getattr(dtypes, field).dtype)
                for field, part in fields.items()
                if part is not None
            }
        )
    return results


def main() -> None:
    if "--write" in sys.argv:
        FILE.write_text(json.dumps(torch_digests(), indent=1) + "\n")
    stored = json.loads(FILE.read_text())
    names = FEW if "--few" in sys.argv else tuple(SPECS)
    cases = [case for case in digest_cases() if case[0].split()[0] in names]
    assert "--few" in sys.argv or [name for name, _, _ in cases] == list(stored)
    results = {name: jax_digest(quantized(spec, x)) for name, spec, x in cases}
    print(
        json.dumps(
            {
                "cases": len(results),
                "different": [name for name in results if results[name] != stored[name]],
            }
        )
    )


if __name__ == "__main__":
    main()
