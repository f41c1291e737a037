"""Grouped products with block-scaled codes: selection by the hardware table, and programs for CUDA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import transformer_engine.jax as te
from transformer_engine.common import optional, recipe
from transformer_engine.common.formats import BLOCK_1D, BLOCK_2D, MXFP8, NVFP4, NVFP4_ROWS
from transformer_engine.common.hardware import nvidia
from transformer_engine.jax.dense import grouped_dense
from transformer_engine.jax.primitives import launching, platforms
from transformer_engine.jax.primitives.grouped_gemm import BLOCK_TABLE, GroupedBlockRequest
from transformer_engine.jax.quantize import QuantizerFactory
from transformer_engine.jax.runtime import platform

UNSUPPORTED = launching.kernels_unsupported_reason()
pytestmark = pytest.mark.skipif(
    UNSUPPORTED is not None, reason=f"no kernel can be lowered for CUDA here: {UNSUPPORTED}"
)
E4M3, E2M1, BFLOAT16 = (
    jnp.dtype(name) for name in (jnp.float8_e4m3fn, jnp.float4_e2m1fn, jnp.bfloat16)
)
RECIPES = {
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
}
KERNELS = {"block": "triton", "mxfp8": "dot_scaled", "nvfp4": "dot_scaled"}


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    monkeypatch.setenv("TE_JAX_KERNELS", "1")
    monkeypatch.setattr(platform, "WITHOUT_GPU", nvidia(10, 0))


def request(**changes) -> GroupedBlockRequest:
    of_mxfp8 = (MXFP8, MXFP8, (E4M3, E4M3), BFLOAT16, False, False, (False, False), "cuda")
    return GroupedBlockRequest(8, 256, 384, 512, *of_mxfp8)._replace(**changes)


def reason(backend: str, requested: GroupedBlockRequest) -> str | None:
    (row,) = [row for row in BLOCK_TABLE.candidates(requested) if row.name == backend]
    return row.rejection_reason(requested)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"platform": "cpu"}, "it needs a CUDA device, the program is for cpu"),
        (
            {"a_format": BLOCK_1D, "b_format": BLOCK_2D},
            "the kernels take two operands of MXFP8 or NVFP4",
        ),
        ({"a_format": NVFP4, "b_format": NVFP4_ROWS}, "b without scales per row"),
        ({"a_format": NVFP4}, "the kernels take two operands of MXFP8 or NVFP4"),
        ({"transformed": (True, False)}, "only one operand is Hadamard transformed"),
        ({"code_dtypes": (E4M3, BFLOAT16)}, "codes in float8_e4m3fn and bfloat16"),
        ({"m": 0}, "a product without elements"),
        ({"k": 48}, "K=48 is not a multiple of 32"),
        ({"n": 40}, "an extent of 40 is not a multiple of 16"),
        ({"contracts_rows": True, "m": 40}, "40 contracted rows are not a multiple of 32"),
        ({"result_dtype": E4M3}, "the kernels write bfloat16, float16 and float32"),
    ],
)
def test_unsupported_products_with_one_byte_scales_have_a_reason(change, sentence):
    assert reason("dot_scaled", request()) is None
    assert sentence in (reason("dot_scaled", request(**change)) or "")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"a_format": BLOCK_2D}, "the kernels multiply blocks of 1x128 by 128x128 elements"),
        ({"contracts_rows": True}, "the kernels multiply blocks of 1x128 by 1x128 elements"),
        ({"has_unreadable_padding": True}, "a has padding rows between its groups"),
        ({"a_format": MXFP8, "b_format": MXFP8}, "mxfp8 by mxfp8"),
    ],
)
def test_unsupported_products_with_float32_scales_have_a_reason(change, sentence):
    blocks = request(a_format=BLOCK_1D, b_format=BLOCK_2D)
    assert reason("triton", blocks) is None
    assert reason("triton", blocks._replace(b_format=BLOCK_1D, contracts_rows=True)) is None
    assert sentence in (reason("triton", blocks._replace(**change)) or "")


@pytest.mark.parametrize(
    ("architecture", "formats", "backend", "sentence"),
    [
        ((9, 0), (MXFP8, MXFP8), "dot_scaled", "compute capability 9.0 has no mxfp8 products"),
        ((8, 9), (NVFP4, NVFP4), "dot_scaled", "8.9 has no nvfp4 products"),
        ((8, 6), (BLOCK_1D, BLOCK_2D), "triton", "8.6 has no fp8 products"),
    ],
)
def test_gpus_without_the_instructions_have_a_reason(
    monkeypatch, architecture, formats, backend, sentence
):
    monkeypatch.setattr(platform, "WITHOUT_GPU", nvidia(*architecture))
    requested = request(a_format=formats[0], b_format=formats[1])
    assert sentence in (reason(backend, requested) or "")


def test_an_early_triton_is_rejected_where_it_multiplies_in_bfloat16(monkeypatch):
    monkeypatch.setattr(platform, "WITHOUT_GPU", nvidia(12, 1))
    for release in ((3, 7), (3, 8), (0, 0)):  # (0, 0): a development build without metadata
        monkeypatch.setattr(optional, "release", lambda name, result=release: result)
        result = reason("dot_scaled", request())
        if release == (3, 7):
            assert result == (
                "tl.dot_scaled multiplies in bfloat16 on compute capability 12.1 before Triton 3.8; "
                "pip install --upgrade 'triton>=3.8'"
            )
        else:
            assert result is None


def explain_for_gpu(monkeypatch, step, shapes):
    """Explanation on a machine with a GPU, where programs are compiled for CUDA."""
    with monkeypatch.context() as patched:
        patched.setattr(platforms, "has_gpu", lambda: True)
        return te.explain(step, *shapes, backward=False)


def grouped_layer_step(name: str):
    """Gradient function for a grouped layer, with input and kernel shapes."""
    with te.autocast(True, RECIPES[name]):
        quantizers = QuantizerFactory.create_set(n_groups=3)
    sizes = jnp.asarray([32, 0, 64], jnp.int32)

    def step(x, kernel):
        y, pullback = jax.vjp(
            lambda x, k: grouped_dense(x, k, sizes, quantizer_set=quantizers), x, kernel
        )
        return pullback(y)

    shapes = (
        jax.ShapeDtypeStruct((112, 128), BFLOAT16),
        jax.ShapeDtypeStruct((3, 128, 256), BFLOAT16),
    )
    return step, shapes


@pytest.mark.parametrize("architecture", [(8, 9), (10, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_three_products_of_a_layer_are_kernels_where_the_gpu_has_them(
    name, architecture, monkeypatch
):
    monkeypatch.setattr(platform, "WITHOUT_GPU", nvidia(*architecture))
    step, shapes = grouped_layer_step(name)
    decisions = explain_for_gpu(monkeypatch, step, shapes).decisions
    chosen = [one.chosen for one in decisions if one.operation == "jax_grouped_block_gemm"]
    native = name == "block" or architecture != (8, 9)
    assert chosen == [KERNELS[name] if native else "dequantized"] * 3
    text = jax.jit(step).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    kernels = text.count("triton_kernel_call_ffi")
    assert "ragged_dot" not in text
    if native:
        # Each product is behind the layout of its groups; casts are the other kernels.
        assert "dot_general" not in text and kernels >= 6


def test_explanations_name_the_gpu(monkeypatch):
    monkeypatch.setattr(platform, "WITHOUT_GPU", nvidia(9, 0))
    step, shapes = grouped_layer_step("mxfp8")
    text = str(explain_for_gpu(monkeypatch, step, shapes))
    assert "dequantized" in text and "compute capability 9.0 has no mxfp8 products" in text
