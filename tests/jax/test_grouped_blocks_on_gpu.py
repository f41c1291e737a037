"""Grouped block-scaled products by kernels, against dequantized values, on a GPU or in the interpreter.

Hopper computes tl.dot_scaled in bfloat16, in which MXFP8 values are exact; sums have tensor-core precision.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jax.compiled import array
from tests.jax.test_scaled_products_on_gpu import skip_where_triton_cannot_compile
from transformer_engine.common.dispatch import use_backend
from transformer_engine.jax.primitives.grouped_gemm import blocks
from transformer_engine.jax.quantize import QuantizerFactory, ScalingMode, TensorUsage

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("as_users_compile")]
ROWS, COLUMNS = TensorUsage.LHS, TensorUsage.LHS_TRANS
GROUPS, M, K, N = 4, 144, 96, 160
# Of the third every tile that the rows can need is a group's, and rows are left.
SIZES = ([40, 0, 72, 16], [0, 128, 1, 3], [1, 1, 1, 129], [0, 0, 3, 0])
FORMATS = {
    "mxfp8": (ScalingMode.MXFP8_1D_SCALING, jnp.float8_e4m3fn),
    "mxfp8-gradient": (ScalingMode.MXFP8_1D_SCALING, jnp.float8_e5m2),
    "nvfp4": (ScalingMode.NVFP4_1D_SCALING, jnp.float4_e2m1fn),
    "nvfp4-rows": (ScalingMode.NVFP4_ROWS_SCALING, jnp.float4_e2m1fn),
    "blocks": (ScalingMode.BLOCK_1D_SCALING, jnp.float8_e4m3fn),
}
MATRICES = {
    "nvfp4": (ScalingMode.NVFP4_2D_SCALING, jnp.float4_e2m1fn),
    "nvfp4-rows": (ScalingMode.NVFP4_1D_SCALING, jnp.float4_e2m1fn),
    "blocks": (ScalingMode.BLOCK_2D_SCALING, jnp.float8_e4m3fn),
}


def quantized(name, x, sizes=None):
    """Quantize grouped rows, or a stack, in both directions by the reference."""
    mode, dtype = FORMATS[name] if sizes is not None else MATRICES.get(name, FORMATS[name])
    quantizer = QuantizerFactory.create(scaling_mode=mode, q_dtype=dtype, n_groups=GROUPS)
    with use_backend(jax_quantize="reference"):
        return jax.jit(lambda x: quantizer.encode(x, sizes)[0])(x)


def values(seed, *shape):
    """Values whose rows differ by powers of two."""
    random = np.random.default_rng(seed)
    return array(random.standard_normal(shape) * np.exp2(random.integers(-6, 6, (*shape[:-1], 1))))


def bound(left, right, name):
    """Error bound for left [M, K] @ right [N, K].T on Hopper.

    Its FP8 instructions add 32 products to a sum. They align these 33 numbers to the largest one and drop what lies
    more than 13 bits below, so that each loses less than 2^-13 of it. Other formats are multiplied in bfloat16.
    """
    left, right = np.abs(left), np.abs(right)
    sums = left @ right.T
    if name != "blocks":
        return 2.0**-11 * sums
    largest = np.zeros_like(sums)
    for depth in range(left.shape[1]):
        largest = np.maximum(largest, np.outer(left[:, depth], right[:, depth]))
    depth = left.shape[1]
    return 2.0**-13 * (depth * largest + -(-depth // 32) * sums)


def check(got, expected, bounds, name):
    """Compare with float64, up to Hopper's FP8 sum precision."""
    beyond = np.abs(np.asarray(got, np.float64) - expected) > bounds
    assert not beyond.any(), f"{name}: {int(beyond.sum())} of {expected.size} elements"


def group_slices(sizes):
    ends = np.cumsum(sizes)
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("features_first", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_grouped_rows_are_multiplied_as_their_dequantized_values(name, features_first, sizes):
    skip_where_triton_cannot_compile(name)
    counts = jnp.asarray(sizes, jnp.int32)
    a = quantized(name, values(1, M, K), counts).get_tensor(ROWS)
    b = quantized(name, values(2, GROUPS, *((N, K) if features_first else (K, N))))
    b = b.get_tensor(ROWS if features_first else COLUMNS)
    call = jax.jit(
        lambda a, b, s: blocks.multiply_rows(a, b, s, jnp.dtype(jnp.float32), features_first)
    )
    got = call(a, b, counts)
    left, right = (np.asarray(x.dequantize(), np.float64) for x in (a, b))
    right = right if features_first else right.swapaxes(1, 2)
    expected, bounds = np.zeros((M, N)), np.zeros((M, N))
    for group, rows in enumerate(group_slices(sizes)):
        expected[rows] = left[rows] @ right[group].T
        bounds[rows] = bound(left[rows], right[group], name)
    check(got, expected, bounds, name)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_grouped_rows_are_contracted_as_their_dequantized_values(name, sizes):
    skip_where_triton_cannot_compile(name)
    counts = jnp.asarray(sizes, jnp.int32)
    a, b = (
        quantized(name, values(seed, M, columns), counts).get_tensor(COLUMNS)
        for seed, columns in ((1, K), (2, N))
    )
    got = jax.jit(lambda a, b, s: blocks.contract_rows(a, b, s, jnp.dtype(jnp.float32)))(
        a, b, counts
    )
    left, right = (np.asarray(x.dequantize(), np.float64) for x in (a, b))
    rows = group_slices(sizes)
    expected = np.stack([left[one].T @ right[one] for one in rows])
    check(got, expected, np.stack([bound(left[one].T, right[one].T, name) for one in rows]), name)
