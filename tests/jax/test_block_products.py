"""Products with block scales on Hopper: kernel selection, and kernels with a workspace in XLA programs."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from transformer_engine.common import optional
from transformer_engine.common.formats import BLOCK_1D, BLOCK_2D, FLOAT8
from transformer_engine.common.hardware import nvidia
from transformer_engine.common.kernels import launch
from transformer_engine.jax.primitives import launching
from transformer_engine.jax.primitives.gemm import TABLE, codes_product, gemm
from transformer_engine.jax.primitives.gemm.request import GemmRequest
from transformer_engine.jax.primitives.operand import Operand

UNSUPPORTED = launching.kernels_unsupported_reason()
needs_bridge = pytest.mark.skipif(
    UNSUPPORTED is not None, reason=f"no kernel can be lowered for CUDA here: {UNSUPPORTED}"
)
CODES, BFLOAT16 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.bfloat16)
REQUEST = GemmRequest(
    BLOCK_1D, BLOCK_2D, CODES, CODES, 4096, 1024, 384, BFLOAT16, "cuda", nvidia(9, 0), True
)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    monkeypatch.setenv("TE_JAX_KERNELS", "1")


def shapes(second, m, n, k):
    """Codes and scales for both operands."""
    blocks = -(-k // 128)
    scale = (n, blocks) if second == BLOCK_1D else (-(-n // 128), blocks)
    extents = ((m, k), (m, blocks), (n, k), scale)
    return [
        jax.ShapeDtypeStruct(extent, dtype)
        for extent, dtype in zip(extents, (CODES, jnp.float32) * 2, strict=True)
    ]


@needs_bridge
@pytest.mark.parametrize(
    "change",
    [
        ({"platform": "cpu"}, "it needs a CUDA device, the program is for cpu"),
        ({"hardware": nvidia(10, 0)}, "compute capability 10.0 has no hopper instructions"),
        ({"hardware": nvidia(8, 9)}, "compute capability 8.9 has no hopper instructions"),
        ({"a_format": FLOAT8, "b_format": FLOAT8}, "1x128 blocks times"),
        ({"a_format": None, "b_format": None}, "1x128 blocks times"),
        ({"m": 0}, "without elements"),
        ({"n": 24}, "N=24 or K=384 is not a multiple of 16"),
        ({"k": 200}, "K=200 is not a multiple of 16"),
        ({"m": 4097}, "M=4097 is not a multiple of 4"),
        ({"m": 1 << 26, "k": 4096}, "more than 2^31"),
        ({"m": 512}, "16 tiles of 256 x 128 leave more than 3 in 10 of 132 multiprocessors idle"),
        ({"m": 256 * 17}, "136 tiles of 256 x 128 leave more than 3 in 10"),
        ({"dtype": jnp.dtype(jnp.float8_e4m3fn)}, "supported: bfloat16"),
    ],
)
def test_unsupported_requests_have_a_reason(change):
    fields, sentence = change
    assert codes_product.gluon_unsupported_reason(REQUEST) is None
    assert sentence in (
        codes_product.gluon_unsupported_reason(dataclasses.replace(REQUEST, **fields)) or ""
    )


@needs_bridge
def test_a_triton_without_gluon_or_with_its_interpreter_is_rejected(monkeypatch):
    import triton

    monkeypatch.setattr(optional, "release", lambda name: (3, 10))
    assert codes_product.gluon_unsupported_reason(REQUEST) == optional.gluon_problem((3, 10))
    monkeypatch.undo()
    monkeypatch.setenv("TE_JAX_KERNELS", "1")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert "Gluon has no interpreter" in (codes_product.gluon_unsupported_reason(REQUEST) or "")
    failure = optional.failure
    # without its cache
    monkeypatch.setattr(launch, "_gluon_reason", launch._gluon_reason.__wrapped__)
    monkeypatch.setattr(
        optional,
        "failure",
        lambda module, *names: (
            f"{module} has no {names[0]}" if "gluon" in module else failure(module, *names)
        ),
    )
    assert "gluon.language.nvidia.hopper has no warpgroup_mma" in (
        codes_product.gluon_unsupported_reason(REQUEST) or ""
    )


def test_equal_requests_bind_the_same_function():
    bind = TABLE.named("gluon").bind
    assert bind is not None and bind(REQUEST) is bind(REQUEST)


@needs_bridge
@pytest.mark.parametrize("second", [BLOCK_2D, BLOCK_1D])
def test_gluon_is_chosen_on_hopper_with_its_workspace_as_a_result(second):
    def product(a, scale_a, b, scale_b):
        first, other = (
            Operand(codes, scale, None, form, BFLOAT16)
            for codes, scale, form in ((a, scale_a, BLOCK_1D), (b, scale_b, second))
        )
        return gemm(first, other, BFLOAT16)

    arrays = shapes(second, 4000, 1008, 400)
    request = dataclasses.replace(REQUEST, b_format=second, m=4000, n=1008, k=400)
    assert (
        next(one.name for one in TABLE.candidates(request) if one.rejection_reason(request) is None)
        == "gluon"
    )
    text = jax.jit(product).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    # 16 x 8 programs; one 128-byte descriptor per matrix and per scale array that the copy engine reads
    maps = 5 if second == BLOCK_1D else 4
    assert re.search(rf"-> \(tensor<4000x1008xbf16>, tensor<{16 * 8 * 128 * maps}xui8>\)", text), (
        text
    )
    assert "output_operand_aliases = []" in text or "output_operand_aliases" not in text


@needs_bridge
@pytest.mark.parametrize(
    ("n", "kernel"),
    [
        (1008, "product_kernel"),
        (1000, "columns_kernel"),
        (272, "columns_kernel"),
    ],
)
def test_an_unsupported_shard_is_multiplied_by_the_other_kernel(n, kernel, monkeypatch):
    started = []
    run = codes_product.run
    monkeypatch.setattr(
        codes_product,
        "run",
        lambda launch, *rest: started.append(launch.kernel.fn.__name__) or run(launch, *rest),
    )
    product = codes_product.CodesProduct(BFLOAT16, True, 1, 2 * n, 400, by_groups=True)
    a, scale_a, b, scale_b = shapes(BLOCK_1D, 3800, n, 400)
    transposed = [jax.ShapeDtypeStruct(x.shape[::-1], x.dtype) for x in (scale_a, scale_b)]
    (out,) = jax.eval_shape(product.run, a, b, *transposed)
    assert started == [kernel]
    assert out.shape == (3800, n)
