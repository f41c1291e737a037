"""Kernels in scaled_product.py for block-scaled codes, against the reference, on a GPU or in the interpreter.

Hopper computes tl.dot_scaled in bfloat16, in which MXFP8 values are exact; sums have tensor-core precision.
"""

from __future__ import annotations

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jax.compiled import array
from transformer_engine.common import optional
from transformer_engine.common.dispatch import use_backend
from transformer_engine.common.formats import (
    BLOCK_1D,
    BLOCK_2D,
    E2M1,
    E4M3,
    E5M2,
    FLOAT8,
    MXFP8,
    NVFP4,
    NVFP4_ROWS,
)
from transformer_engine.common.quantize_spec import QuantizeSpec
from transformer_engine.jax.primitives.gemm import decoded, float8, reference, scaled_codes
from transformer_engine.jax.primitives.operand import Operand
from transformer_engine.jax.primitives.quantize import quantize

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("as_users_compile")]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PAIRS = {
    "mxfp8": ((MXFP8, E4M3), (MXFP8, E4M3)),
    "mxfp8-gradient": ((MXFP8, E5M2), (MXFP8, E4M3)),
    "nvfp4": ((NVFP4, E2M1), (NVFP4, E2M1)),
    "nvfp4-rows": ((NVFP4_ROWS, E2M1), (NVFP4, E2M1)),
    "blocks": ((BLOCK_1D, E4M3), (BLOCK_2D, E4M3)),
    "rows-of-blocks": ((BLOCK_1D, E5M2), (BLOCK_1D, E4M3)),
    "square-blocks": ((BLOCK_2D, E4M3), (BLOCK_2D, E4M3)),
    "squares-by-rows": ((BLOCK_2D, E4M3), (BLOCK_1D, E5M2)),
}
# A part of a tile in each direction; few rows, which swap the operands; one row.
SHAPES = ((144, 80, 256), (130, 70, 160), (20, 144, 96), (1, 33, 64))


def skip_where_triton_cannot_compile(name: str) -> None:
    if name.startswith("nvfp4") and not INTERPRETED and optional.release("triton") < (3, 8):
        pytest.skip("tl.dot_scaled of NVFP4 does not compile for Hopper before Triton 3.8")


def operand(form, element, seed: int, rows: int, depth: int) -> Operand:
    random = np.random.default_rng(seed)
    values = random.standard_normal((rows, depth)) * np.exp2(random.integers(-6, 6, (rows, 1)))
    x = array(values, jnp.bfloat16)
    with use_backend(jax_quantize="reference"):
        result = jax.jit(lambda x: quantize(x, QuantizeSpec(form, element)))(x)
    return Operand(result.codes, result.scale, result.amax, form, x.dtype)


def check(got, a: Operand, b: Operand, name: str) -> None:
    """Compare with the reference, up to the precision in Hopper's FP8 sums and the result's dtype."""
    expected, bound = (
        np.asarray(
            jax.jit(lambda a, b: reference.run(a, b, jnp.dtype(jnp.float32), True))(*pair),
            np.float64,
        )
        for pair in ((a, b), tuple(map(magnitudes, (a, b))))
    )
    rounding = float(jnp.finfo(got.dtype).eps) * np.abs(expected)
    beyond = np.abs(np.asarray(got, np.float64) - expected) > 2.0**-11 * bound + rounding
    assert not beyond.any(), f"{name}: {int(beyond.sum())} of {expected.size} elements"


def magnitudes(operand: Operand) -> Operand:
    return Operand(
        jnp.abs(operand.codes.astype(jnp.float32)).astype(operand.codes.dtype),
        operand.scale,
        operand.amax,
        operand.format,
        operand.dtype,
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", PAIRS)
def test_matrix_instructions_multiply_codes_as_the_reference_does(name, dtype):
    skip_where_triton_cannot_compile(name)
    first, second = PAIRS[name]
    for m, n, k in SHAPES:
        a, b = operand(*first, 1, m, k), operand(*second, 2, n, k)
        got = jax.jit(lambda a, b: scaled_codes.run_dot_scaled(a, b, jnp.dtype(dtype), True))(a, b)
        assert got.dtype == jnp.dtype(dtype) and got.shape == (m, n)
        check(got, a, b, f"{name} {(m, n, k)}")


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_operands_of_several_axes_are_multiplied_as_matrices(name):
    skip_where_triton_cannot_compile(name)
    (form, element), _ = PAIRS[name]
    a, b = operand(form, element, 1, 24, 192), operand(form, element, 2, 48, 192)
    expected = jax.jit(
        lambda a, b: scaled_codes.run_dot_scaled(a, b, jnp.dtype(jnp.float32), True)
    )(a, b)
    for split in ((6, 32), (64, 3)):
        left = Operand(a.codes.reshape(4, 6, *split), a.scale, a.amax, a.format, a.dtype, 2)
        right = Operand(b.codes.reshape(3, 16, *split), b.scale, b.amax, b.format, b.dtype, 2)
        got = jax.jit(lambda a, b: scaled_codes.run_dot_scaled(a, b, jnp.dtype(jnp.float32), True))(
            left, right
        )
        assert got.shape == (4, 6, 3, 16)
        np.testing.assert_array_equal(got.reshape(24, 48), expected)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8-gradient", "nvfp4", "nvfp4-rows", "tensor"])
def test_bfloat16_factors_of_codes_are_exact(name):
    first, second = (PAIRS | {"tensor": ((FLOAT8, E5M2), (FLOAT8, E4M3))})[name]
    run = float8.run_widened if name == "tensor" else functools.partial(decoded.run, widens=True)
    for m, n, k in SHAPES:
        a, b = operand(*first, 1, m, k), operand(*second, 2, n, k)
        got = jax.jit(lambda a, b: run(a, b, jnp.dtype(jnp.float32), True))(a, b)
        check(got, a, b, f"{name} {(m, n, k)}")
