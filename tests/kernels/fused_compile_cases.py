"""Compile the softmax, dropout, packed-RoPE and fused-cast kernels without a GPU and print PTX counts.

By default, sm80 and sm100 have one launch per kernel; `--all` compiles every launch for them too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.kernels.compile_cases import compile_ptx, count
from transformer_engine.common.formats import E4M3, FLOAT32_MAX
from transformer_engine.common.kernels import (
    activation_cast,
    activation_recompute,
    block_fused,
    column_sums,
    dropout,
    norm,
    rope_packed,
    softmax,
    symmetric_product,
    transpose,
)
from transformer_engine.common.kernels.launch import Launch, Machine

Pointers = dict[str, "str | None"]

VALUES, SCALAR, BYTES, CODES = "*bf16", "*fp32", "*u8", "*fp8e4nv"
CONSTANTS = {"limit": "fp32", "alpha": "fp32", "offset": "fp32"}
TARGET = {"multiplier": SCALAR, "amax": SCALAR, "codes": CODES, "codes_t": CODES, "scale": SCALAR}
SHAPE = (8192, 4096)


def plain_launches() -> Iterator[tuple[str, Launch, Pointers]]:
    """Kernels that read and write 16-bit numbers."""
    scores: Pointers = {"x": VALUES, "mask": BYTES, "y": VALUES, "scale": "fp32"}
    gradient: Pointers = {"dy": VALUES, "y": VALUES, "dx": VALUES, "scale": "fp32"}
    for keys in (2048, 16384, 20000):
        shape = (1, 2, 64, keys)
        yield f"softmax_{keys}", softmax.forward(shape, (0, 0, keys, 1), "bfloat16", 0.1, 0), scores
        yield f"softmax_backward_{keys}", softmax.backward(shape, "bfloat16", 0.1, 0), gradient
    forward: Pointers = {
        "x": VALUES,
        "bias": VALUES,
        "residual": VALUES,
        "seed": "*i64",
        "mask": BYTES,
        "y": VALUES,
    }
    yield (
        "dropout",
        dropout.forward(1 << 20, 1024, "bfloat16", 6554, 1.1),
        {**forward, "factor": "fp32"},
    )
    added: Pointers = {**forward, "seed": None, "mask": None, "factor": "fp32"}
    yield "bias_add", dropout.forward(1 << 20, 1024, "bfloat16", 0, 1.0, drops=False), added
    backward: Pointers = {"dy": VALUES, "mask": BYTES, "dx": VALUES, "factor": "fp32"}
    yield "dropout_backward", dropout.backward(1 << 20, "bfloat16", 1.1), backward
    rotated: Pointers = {
        "q_angles": SCALAR,
        "k_angles": SCALAR,
        "start": None,
        "cu_seqlens": None,
        "q": VALUES,
        "k": VALUES,
        "v": VALUES,
    }
    for transposed in (False, True):
        launch = rope_packed.rotate_packed(
            (64, 2), (8, 4), (128, 128), (8192, 4096, 768), (64, 128, 128), 0, "bfloat16",
            layout="sbhd", interleaved=False, transposed=transposed, context=(1, 0),
        )  # fmt: skip
        packed: Pointers = {
            "source": None if transposed else VALUES,
            "gradient": VALUES if transposed else None,
        }
        yield f"rope_packed_{transposed}", launch, {**rotated, **packed}
    sums: Pointers = {"x": VALUES, "amax": SCALAR, "workspace": SCALAR}
    yield (
        "column_sums",
        column_sums.column_sums(SHAPE, 4096, Machine(132, 227 << 10, 2), measures=True),
        sums,
    )
    yield "transpose", transpose.transpose(SHAPE), {"codes": BYTES, "codes_t": BYTES}
    products = {"a": VALUES, "b": VALUES, "c": VALUES, "out": VALUES}
    for name, rows in (("symmetric_product", 2048), ("symmetric_product_odd", 2040)):
        launch = symmetric_product.symmetric_product(
            2, rows, 1024, "bfloat16", (1.0, 2.0), 163 << 10
        )
        yield name, launch, products


def casting_launches() -> Iterator[tuple[str, Launch, Pointers]]:
    """Kernels that write FP8 codes."""
    for name, gated in (("gelu", False), ("swiglu", True)):
        launch = activation_cast.forward(
            name, gated, SHAPE, 8192, "bfloat16", (7.0, 1.7, 1.0), E4M3, columnwise=True
        )
        yield f"{name}", launch, {"x": VALUES, **TARGET, "y": None, **CONSTANTS}
    for name, gated in (("identity", False), ("gelu", False), ("swiglu", True)):
        launch = activation_cast.backward(
            name,
            gated,
            SHAPE,
            (4096, 8192),
            "bfloat16",
            (7.0, 1.7, 1.0),
            E4M3,
            columnwise=True,
            sums_columns=True,
        )
        pointers = {"dy": VALUES, "x": None if name == "identity" else VALUES, **TARGET}
        yield f"{name}_backward", launch, {**pointers, "dx": None, "workspace": SCALAR, **CONSTANTS}
    output = activation_recompute.OutputCodes(E4M3, power_of_two=False, epsilon=0.0)
    for name, gated, element, encoded in (
        ("gelu", False, E4M3, False),
        ("swiglu", True, E4M3, False),
        ("swiglu", True, None, False),
        ("swiglu", True, E4M3, True),
    ):
        program = activation_recompute.backward(
            name,
            gated,
            SHAPE,
            (4096, 8192),
            "bfloat16",
            (7.0, 1.7, 1.0),
            element,
            True,
            output,
            encoded,
        )
        target = TARGET if element else {**dict.fromkeys(TARGET), "amax": SCALAR}
        pointers = {
            "dy": VALUES,
            "x": CODES if encoded else VALUES,
            "x_scale": SCALAR if encoded else None,
        }
        pointers |= {**target, "output_multiplier": SCALAR, "output_amax": None}
        pointers |= {
            "dx": None if element else VALUES,
            "output_codes_t": CODES,
            "output_scale": SCALAR,
        }
        yield (
            f"{name}_recompute_{element is None}_{encoded}",
            program.steps[0].launch,
            {**pointers, **CONSTANTS},
        )


def block_launches(shared_memory: int = 232448) -> Iterator[tuple[str, Launch, Pointers]]:
    """Kernels that write FP8 codes in blocks; one launch per plan."""
    target: Pointers = {"codes": CODES, "scale": SCALAR, "codes_t": CODES, "scale_t": SCALAR}
    both = block_fused.Blocks(
        E4M3,
        columnwise=True,
        square=False,
        power_of_two=True,
        epsilon=0.0,
        value_for_inf=FLOAT32_MAX,
    )
    constants = (7.0, 1.7, 1.0)
    machine = partial(block_fused.Machine, 132, shared_memory)
    launch = block_fused.forward("gelu", False, SHAPE, 8192, constants, both, machine(2))
    yield "gelu_blocks", launch, {"x": VALUES, **target, **CONSTANTS}
    squares = both._replace(square=True)
    launch = block_fused.forward("swiglu", True, SHAPE, 8192, constants, squares, machine(4))
    yield "swiglu_squares", launch, {"x": VALUES, **target, **CONSTANTS}
    rows: Pointers = {**target, "codes_t": None, "scale_t": None}
    for name, gated in (("identity", False), ("gelu", False), ("swiglu", True)):
        for blocks, result in ((both, target), (both._replace(columnwise=False), rows)):
            launch = block_fused.backward(
                name, gated, SHAPE, (4096, 8192), constants, blocks, True, machine(6)
            )
            pointers = {"dy": VALUES, "x": None if name == "identity" else VALUES, **result}
            key = f"{name}_backward_blocks_{blocks.columnwise}"
            yield key, launch, {**pointers, "workspace": SCALAR, **CONSTANTS}
    options: Pointers = {
        "x": VALUES,
        "gamma": VALUES,
        "beta": VALUES,
        "multiplier": None,
        "amax": None,
    }
    result = {
        "codes": CODES,
        "scale": SCALAR,
        "y": None,
        "mean": SCALAR,
        "rstdev": SCALAR,
        "eps": "fp32",
    }
    for width in (4096, 5120, 20480):
        alone = both._replace(columnwise=False)
        rows = norm.NormRows(
            8192, width, width, "bfloat16", 1e-5, zero_centered=False, centered=True, processors=132
        )
        launch = norm.forward(rows, None, alone)
        yield f"norm_blocks_{width}", launch, {**options, **result}


def one_per_kernel(
    launches: list[tuple[str, Launch, Pointers]],
) -> list[tuple[str, Launch, Pointers]]:
    """Last launch per kernel."""
    return list(
        {
            launch.kernel.fn.__name__: (name, launch, pointers)
            for name, launch, pointers in launches
        }.values()
    )


def main() -> None:
    facts = {}
    plain, casting = list(plain_launches()), [*casting_launches(), *block_launches()]
    all_launches = "--all" in sys.argv
    of_80, of_100 = (some if all_launches else one_per_kernel(some) for some in (plain, casting))
    for capability, launches in ((80, of_80), (90, plain + casting), (100, of_100)):
        for name, launch, pointers in launches:
            ptx, shared = compile_ptx(launch, pointers, capability)
            facts[f"sm{capability}-{name}"] = {
                "shared": shared,
                "casts": count(r"\bcvt\.\S*e4m3x2\.f", ptx),
                "saturating": count(r"\bcvt\.rn\.satfinite\.e4m3x2\.f32", ptx),
                "double": count(r"\.f64", ptx),
            }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
