"""Kernels for quantized and grouped products, against the reference, on a GPU or in the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer_engine.jax as te
from tests.jax.compiled import array
from transformer_engine.common import recipe
from transformer_engine.common.dispatch import use_backend
from transformer_engine.common.formats import BLOCK_1D, BLOCK_2D, E4M3, E5M2, FLOAT8
from transformer_engine.common.quantize_spec import QuantizeSpec
from transformer_engine.jax.dense import dense, grouped_dense
from transformer_engine.jax.primitives.gemm import codes_product, gemm
from transformer_engine.jax.primitives.grouped_gemm import grouped_contraction, grouped_gemm
from transformer_engine.jax.primitives.operand import Operand
from transformer_engine.jax.primitives.quantize import quantize
from transformer_engine.jax.quantize import QuantizerFactory, ScaledTensor1x

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("as_users_compile")]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
on_a_gpu = pytest.mark.skipif(INTERPRETED, reason="XLA's own products run on a GPU alone")


def normal(seed, *shape, dtype=jnp.bfloat16):
    return array(np.random.default_rng(seed).standard_normal(shape), dtype)


def operand(form, element, seed, rows, depth):
    x = normal(seed, rows, depth)
    with use_backend(jax_quantize="reference"):
        result = jax.jit(lambda x: quantize(x, QuantizeSpec(form, element)))(x)
    return Operand(result.codes, result.scale, result.amax, form, x.dtype)


def run_products(backends, a, b, dtype, exact=True):
    results = []
    for backend in backends:
        with use_backend(jax_gemm=backend):
            results.append(jax.jit(lambda a, b: gemm(a, b, jnp.dtype(dtype), exact))(a, b))
    return results


def near(got, expected, tolerance, name=""):
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert np.isfinite(got).all(), name
    error = np.abs(got - expected).max() / np.abs(expected).max()
    assert error <= tolerance, f"{name}: {error:.2e} > {tolerance:.2e}"


PAIRS = {
    "tensor": ((FLOAT8, E4M3), (FLOAT8, E4M3)),
    "tensor-gradient": ((FLOAT8, E5M2), (FLOAT8, E4M3)),
    "blocks-by-squares": ((BLOCK_1D, E4M3), (BLOCK_2D, E4M3)),
    "blocks-by-blocks": ((BLOCK_1D, E4M3), (BLOCK_1D, E5M2)),
}
# K = 160: the last block is partial.
SHAPES = ((144, 80, 256), (48, 144, 160))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", PAIRS)
def test_triton_kernel_product_of_codes_matches_the_reference(name, exact, dtype):
    first, second = PAIRS[name]
    for m, n, k in SHAPES:
        a, b = operand(*first, 1, m, k), operand(*second, 2, n, k)
        actual = run_products(("triton", "reference"), a, b, dtype, exact)
        assert actual[0].dtype == jnp.dtype(dtype)
        near(*actual, 2e-3 if dtype == "float32" else 1e-2, f"{name} {(m, n, k)}")


# Less than a tile, less than a group's rows, several tiles with a part of one at each end, several tiles a program.
TILES = ((4, 16, 16), (144, 80, 256), (300, 272, 400), (2052, 2576, 1552))


@on_a_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", ["blocks-by-squares", "blocks-by-blocks"])
def test_warpgroup_products_of_codes_match_the_reference(name, dtype, monkeypatch):
    monkeypatch.setattr(codes_product, "idle", lambda m, n: None)
    first, second = PAIRS[name]
    for m, n, k in TILES:
        result = run_products(
            ("gluon", "reference"), operand(*first, 1, m, k), operand(*second, 2, n, k), dtype
        )
        near(*result, 1e-2 if dtype == "bfloat16" else 2e-3, f"{name} {(m, n, k)}")


@on_a_gpu
def test_groups_of_warps_add_in_float32_and_in_one_order():
    a, b = operand(BLOCK_1D, E4M3, 1, 2048, 8192), operand(BLOCK_2D, E4M3, 2, 2048, 8192)
    calls = {}
    for backend in ("gluon", "triton", "reference"):
        with use_backend(jax_gemm=backend):
            calls[backend] = (
                jax.jit(lambda a, b: gemm(a, b, jnp.dtype(jnp.float32))).lower(a, b).compile()
            )
    results = {name: np.asarray(call(a, b), np.float64) for name, call in calls.items()}
    error = {name: np.linalg.norm(out - results["reference"]) for name, out in results.items()}
    assert 0 < error["gluon"] <= 1.1 * error["triton"]
    for _ in range(3):
        np.testing.assert_array_equal(
            np.asarray(calls["gluon"](a, b), np.float64), results["gluon"]
        )


@on_a_gpu
def test_the_direct_xla_product_matches_the_reference():
    a, b = operand(FLOAT8, E4M3, 1, 256, 512), operand(FLOAT8, E4M3, 2, 128, 512)
    near(*run_products(("direct", "reference"), a, b, "bfloat16"), 1e-2)


SCALED = """
import json, jax, jax.numpy as jnp, numpy as np
from tests.jax import test_products_on_gpu as tests
from transformer_engine.common.dispatch import use_backend
from transformer_engine.jax.primitives.gemm import codes_product, gemm
a, b = tests.operand(tests.FLOAT8, tests.E4M3, 1, 256, 512), tests.operand(tests.FLOAT8, tests.E4M3, 2, 128, 512)
found, texts = [], []
for backend in ("scaled", "reference"):
    with use_backend(jax_gemm=backend):
        call = jax.jit(lambda a, b: gemm(a, b, jnp.dtype(jnp.bfloat16)))
        found.append(np.asarray(call(a, b), np.float64))
        texts.append(call.lower(a, b).compile().as_text())
error = abs(found[0] - found[1]).max() / abs(found[1]).max()
# 1 + 2^-8 * 0.9 is 1 in bfloat16, but its square rounds up to the next number.
scale, codes, dtype = jnp.full(1, 1 + 0.9 / 256), jnp.ones((64, 256), jnp.float8_e4m3fn), jnp.dtype(jnp.bfloat16)
ones = tests.Operand(codes, scale, None, tests.FLOAT8, dtype)
with use_backend(jax_gemm="scaled"):
    product = float(jax.jit(lambda a, b: gemm(a, b, dtype))(ones, ones)[0, 0])
library = "cublas$lt$matmul$f8" in texts[0]
c = tests.operand(tests.FLOAT8, tests.E4M3, 3, 128, 512)
with use_backend(jax_gemm="scaled"):
    two = jax.jit(lambda a, b, c: [gemm(a, other, dtype) for other in (b, c)]).lower(a, b, c).compile().as_text()
shared = two.count('"__cublas$lt$matmul$f8"')
facts = {"shared": shared, "error": error, "product": product, "library": library, "text": texts[0][-1500:]}
print(json.dumps(facts))
"""


@on_a_gpu
def test_with_the_flag_a_product_is_one_call_of_cublaslt_with_its_scales():
    flags = "--xla_gpu_enable_triton_gemm=false"
    done = subprocess.run(
        [sys.executable, "-c", SCALED],
        capture_output=True,
        text=True,
        env=os.environ
        | {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["library"], facts["text"]
    assert facts["shared"] == 2, "products of one operand became one in bfloat16"
    assert facts["error"] < 1e-2
    assert facts["product"] == 256 * (1 + 2**-7), "the scales were rounded to bfloat16"


# Of the third every tile that rows of 144 can need is a group's, and rows are left.
SIZES = ([40, 0, 72, 16], [0, 128, 1, 3], [1, 1, 1, 129], [0, 0, 3, 0])
GROUPS, K, N = 4, 96, 160


def run_both_backends(call, *arrays):
    results = []
    for backend in ("triton", "ragged_dot"):
        with use_backend(jax_grouped_gemm=backend):
            results.append(jax.jit(lambda *a: call(*a))(*arrays))
    return results


@pytest.mark.parametrize("features_first", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_rows_in_groups_are_multiplied_as_by_ragged_dot(sizes, features_first):
    a = normal(1, 144, K)
    b = normal(2, *((GROUPS, N, K) if features_first else (GROUPS, K, N)))
    sizes = jnp.asarray(sizes, jnp.int32)
    got, expected = run_both_backends(
        lambda a, b, s: grouped_gemm(a, b, s, jnp.bfloat16, features_first=features_first),
        a,
        b,
        sizes,
    )
    near(got, expected, 1e-2)
    assert not np.asarray(got, np.float32)[int(sizes.sum()) :].any(), (
        "rows behind the last group are zero"
    )


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_rows_in_groups_are_contracted_as_by_ragged_dot(sizes, scaled):
    dtypes = (jnp.float8_e4m3fn, jnp.float8_e5m2) if scaled else (jnp.bfloat16,) * 2
    a, b = normal(1, 144, K, dtype=dtypes[0]), normal(2, 144, N, dtype=dtypes[1])
    scales = (jnp.arange(1.0, 5.0), jnp.arange(2.0, 6.0)) if scaled else None
    got, expected = run_both_backends(
        lambda a, b, s: grouped_contraction(a, b, s, jnp.float32, scales),
        a,
        b,
        jnp.asarray(sizes, jnp.int32),
    )
    if not scaled:
        near(got, expected, 1e-5)
        return
    # FP8 tensor cores keep fewer sum bits than a bfloat16 product with the same codes.
    begin = 0
    for group, rows in enumerate(sizes):
        of_group = slice(begin, begin + rows)
        codes = [np.asarray(x[of_group], np.float64) for x in (a, b)]
        scale = float(scales[0][group] * scales[1][group])
        assert_product(got[group] / scale, codes[0].T, codes[1], f"group {group}")
        begin += rows


@pytest.mark.parametrize("element", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_codes_in_groups_are_multiplied_as_by_ragged_dot(element):
    a, b = normal(1, 144, K, dtype=element), normal(2, GROUPS, N, K, dtype=jnp.float8_e4m3fn)
    scales = jnp.arange(1.0, 5.0), jnp.arange(2.0, 6.0)
    got, expected = run_both_backends(
        lambda a, b, s: grouped_gemm(a, b, s, jnp.bfloat16, scales, features_first=True),
        a,
        b,
        jnp.asarray(SIZES[0], jnp.int32),
    )
    near(got, expected, 1e-2)


RECIPES = {
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
}


def exact_product(a, b):
    """a @ b in float64, and the error bound for a kernel.

    Rounding to bfloat16 has relative error 2^-9. Tensor cores align 32 code products and keep 13 bits: each
    product loses up to 2^-13 times the largest, which is below 2^-9 times the sum of all magnitudes.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    product = a @ b
    return product, 2.0**-8 * np.abs(product) + 2.0**-9 * (np.abs(a) @ np.abs(b))


def assert_product(got, a, b, name):
    expected, bound = exact_product(a, b)
    got = np.asarray(got, np.float64)
    assert np.isfinite(got).all(), name
    beyond = np.abs(got - expected) > bound  # for an empty sum both bound and result are 0
    assert not beyond.any(), (
        f"{name}: {(np.abs(got - expected)[beyond] / bound[beyond]).max():.2f} times what rounding allows"
    )


def step_gradients(product, dy, *arguments):
    """(y, gradients and next states); dy is an argument, so that its codes do not depend on y's rounding."""

    def both(dy, *arguments):
        y, pullback = jax.vjp(product, *arguments)
        return y, *pullback(dy)

    return jax.jit(both)(dy, *arguments)


def values(quantizer, *arguments):
    """Dequantized codes from both directions, as the reference computes them, in the input's layout."""
    with use_backend(jax_quantize="reference"):
        tensor = quantizer.encode(
            *arguments, is_rowwise=True, is_colwise=True, dq_dtype=jnp.float32
        )[0]
        return tuple(
            # Grouped tensors dequantize in the input's layout, single tensors in their data's layout.
            np.asarray(one.values() if isinstance(one, ScaledTensor1x) else one.dequantize())
            for one in (tensor.rowwise_tensor, tensor.colwise_tensor)
        )


def advance(quantizer, *arguments):
    return jax.tree.leaves(quantizer.advanced(quantizer.encode(*arguments)[1]))


@pytest.mark.parametrize("name", RECIPES)
def test_a_dense_layer_and_its_gradients_are_exact_products_of_the_codes(name):
    x, kernel = normal(1, 256, 128), normal(2, 128, 160, dtype=jnp.float32)
    dy = normal(3, 256, 160)
    with te.autocast(True, RECIPES[name]):
        result = QuantizerFactory.create_set()
        y, dx, dkernel, following = step_gradients(
            lambda x, kernel, output: dense(x, kernel, quantizer_set=output), dy, x, kernel, result
        )
    (x_rows, x_columns), (kernel_rows, kernel_columns) = (
        values(result.x, x),
        values(result.kernel, kernel),
    )
    dy_rows, dy_columns = values(result.dgrad, dy)
    assert_product(y, x_rows, kernel_columns, "y")
    assert_product(dx, dy_rows, kernel_rows.T, "dx")
    assert_product(dkernel, x_columns.T, dy_columns, "dkernel")
    pairs = zip((result.x, result.kernel, result.dgrad), (x, kernel, dy), strict=True)
    reference = [leaf for quantizer, array in pairs for leaf in advance(quantizer, array)]
    for got, expected in zip(jax.tree.leaves(following), reference, strict=True):
        np.testing.assert_array_equal(got, expected, "state")


@pytest.mark.parametrize("name", ["none", "delayed", "current"])
def test_a_grouped_dense_layer_and_its_gradients_are_exact_products_of_the_codes(name):
    x, kernel, dy = normal(1, 144, K), normal(2, GROUPS, K, N), normal(3, 144, N)
    sizes = jnp.asarray(SIZES[0], jnp.int32)
    with te.autocast(name != "none", RECIPES.get(name)):
        result = QuantizerFactory.create_set(n_groups=GROUPS)
        y, dx, dkernel, _ = step_gradients(
            lambda x, kernel, output: grouped_dense(x, kernel, sizes, quantizer_set=output),
            dy,
            x,
            kernel,
            result,
        )
    if name == "none":
        (x_rows, x_columns), (kernel_rows, kernel_columns), (dy_rows, dy_columns) = (
            [np.asarray(one, np.float64)] * 2 for one in (x, kernel, dy)
        )
    else:
        x_rows, x_columns = values(result.x, x, sizes)
        kernel_rows, kernel_columns = values(result.kernel, kernel, None)
        dy_rows, dy_columns = values(result.dgrad, dy, sizes)
    ends = np.cumsum(SIZES[0])
    for group, (begin, end) in enumerate(zip(ends - SIZES[0], ends, strict=True)):
        rows = slice(begin, end)
        if begin < end:
            assert_product(y[rows], x_rows[rows], kernel_columns[group], f"y {group}")
            assert_product(dx[rows], dy_rows[rows], kernel_rows[group].T, f"dx {group}")
            assert_product(dkernel[group], x_columns[rows].T, dy_columns[rows], f"dkernel {group}")
        else:
            assert not np.asarray(dkernel[group], np.float32).any(), "no row, no gradient"
    assert (
        not np.asarray(y[ends[-1] :], np.float32).any()
        and not np.asarray(dx[ends[-1] :], np.float32).any()
    )
