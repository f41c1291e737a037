"""Products with block-scaled codes: backend selection by the hardware table, and programs for CUDA."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from transformer_engine.common import optional
from transformer_engine.common.formats import BLOCK_1D, BLOCK_2D, FLOAT8, MXFP8, NVFP4, NVFP4_ROWS
from transformer_engine.common.hardware import nvidia
from transformer_engine.jax.primitives import launching
from transformer_engine.jax.primitives.gemm import TABLE, decoded, gemm, scaled_codes
from transformer_engine.jax.primitives.gemm.request import GemmRequest
from transformer_engine.jax.primitives.operand import Operand
from transformer_engine.jax.runtime import platform

UNSUPPORTED = launching.kernels_unsupported_reason()
needs_bridge = pytest.mark.skipif(
    UNSUPPORTED is not None, reason=f"no kernel can be lowered for CUDA here: {UNSUPPORTED}"
)
E4M3, E5M2, BFLOAT16 = (
    jnp.dtype(name) for name in (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16)
)
REQUEST = GemmRequest(
    MXFP8, MXFP8, E4M3, E4M3, 256, 384, 512, BFLOAT16, "cuda", nvidia(10, 0), True
)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    monkeypatch.setenv("TE_JAX_KERNELS", "1")


def select_backend(request: GemmRequest) -> str:
    return next(
        row.name for row in TABLE.candidates(request) if row.rejection_reason(request) is None
    )


@needs_bridge
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"platform": "cpu"}, "it needs a CUDA device, the program is for cpu"),
        ({"hardware": nvidia(9, 0)}, "compute capability 9.0 has no mxfp8 products"),
        (
            {"hardware": nvidia(8, 9), "a_format": NVFP4, "b_format": NVFP4},
            "8.9 has no nvfp4 products",
        ),
        (
            {"a_format": BLOCK_1D, "b_format": BLOCK_2D, "hardware": nvidia(8, 6)},
            "8.6 has no fp8 products",
        ),
        ({"a_format": FLOAT8, "b_format": FLOAT8}, "an operand has no block scales"),
        ({"a_format": BLOCK_1D}, "scales of 128 and of 32 contracted elements"),
        ({"m": 0}, "without elements"),
        ({"a_format": NVFP4, "b_format": NVFP4, "k": 31}, "K=31 codes do not fill whole bytes"),
        ({"dtype": jnp.dtype(E4M3)}, "supported: bfloat16, float16 and float32"),
    ],
)
def test_unsupported_products_of_the_kernels_have_a_reason(change, sentence):
    assert scaled_codes.unsupported_reason(REQUEST) is None
    assert sentence in (
        scaled_codes.unsupported_reason(dataclasses.replace(REQUEST, **change)) or ""
    )


@needs_bridge
def test_an_early_triton_is_rejected_where_it_multiplies_in_bfloat16(monkeypatch):
    request = dataclasses.replace(REQUEST, hardware=nvidia(12, 1))
    for release, sentence in (
        ((3, 8), None),
        ((3, 7), "before Triton 3.8; pip install --upgrade 'triton>=3.8'"),
    ):
        monkeypatch.setattr(optional, "release", lambda name, found=release: found)
        reason = scaled_codes.unsupported_reason(request)
        assert reason is None if sentence is None else sentence in (reason or "")
    assert select_backend(request) == "scaled_matmul"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"platform": "cpu"}, "it needs a CUDA device"),
        ({"hardware": nvidia(9, 0)}, "compute capability 9.0 has no mxfp8 products"),
        ({"a_format": BLOCK_1D, "b_format": BLOCK_2D}, "it takes two operands of MXFP8 or NVFP4"),
        ({"a_element": E5M2, "b_element": E5M2}, "both operands are E5M2"),
        ({"n": 24}, "N=24 is not a multiple of 16"),
        ({"k": 48}, "K=48 of 32"),
    ],
)
def test_unsupported_products_of_the_library_have_a_reason(change, sentence):
    assert scaled_codes.matmul_unsupported_reason(REQUEST) is None
    assert sentence in (
        scaled_codes.matmul_unsupported_reason(dataclasses.replace(REQUEST, **change)) or ""
    )


def test_bfloat16_does_not_represent_codes_times_float32_scales():
    request = dataclasses.replace(
        REQUEST, a_format=BLOCK_1D, b_format=BLOCK_1D, hardware=nvidia(8, 0)
    )
    assert "need more bits" in (decoded.widen_unsupported_reason(request) or "").replace(
        "needs", "need"
    )
    assert select_backend(request) == "decoded"
    assert select_backend(dataclasses.replace(REQUEST, hardware=nvidia(8, 0))) == "widen"


@needs_bridge
def test_blocks_of_any_pair_and_extent_are_native_where_fp8_is():
    for hardware in (nvidia(8, 9), nvidia(9, 0), nvidia(10, 0), nvidia(12, 0)):
        request = dataclasses.replace(
            REQUEST, hardware=hardware, a_format=BLOCK_1D, b_format=BLOCK_2D
        )
        for change in (
            {"k": 500, "n": 13},
            {"a_format": BLOCK_2D, "b_format": BLOCK_2D},
            {"a_format": BLOCK_2D, "b_format": BLOCK_1D},
        ):
            assert select_backend(dataclasses.replace(request, **change)) == "dot_scaled"


def operand(form, rows: int, depth: int) -> Any:
    """Operand that holds shapes without values."""
    shape: Any = jax.ShapeDtypeStruct
    length = form.block[1]
    nvfp4 = form.packing == 2
    amax = shape((rows if form.row_scaled else 1,), jnp.float32)
    return Operand(
        shape((rows, depth), jnp.float4_e2m1fn if nvfp4 else E4M3),
        shape((rows, -(-depth // length)), E4M3 if nvfp4 else jnp.float8_e8m0fnu),
        amax if nvfp4 else None,
        form,
        BFLOAT16,
    )


def program(a: Operand, b: Operand) -> str:
    traced = jax.jit(lambda a, b: gemm(a, b, BFLOAT16)).trace(a, b)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@needs_bridge
@pytest.mark.parametrize("architecture", [(10, 0), (12, 0)])
@pytest.mark.parametrize(
    "forms", [(MXFP8, MXFP8), (NVFP4, NVFP4), (NVFP4_ROWS, NVFP4)], ids=lambda f: f[0].name
)
def test_a_product_is_two_swizzles_and_one_kernel(architecture, forms, monkeypatch):
    monkeypatch.setattr(platform, "WITHOUT_GPU", nvidia(*architecture))
    for rows in (256, 16):
        text = program(operand(forms[0], rows, 512), operand(forms[1], 384, 512))
        assert text.count("triton_kernel_call_ffi") == 3
        assert "dot_general" not in text and "block_scaled_dot" not in text


@needs_bridge
@pytest.mark.parametrize("form", [MXFP8, NVFP4], ids=lambda form: form.name)
def test_the_copy_engine_has_its_descriptors_in_a_workspace(form, monkeypatch):
    texts = []
    for architecture in ((10, 0), (12, 0)):
        monkeypatch.setattr(platform, "WITHOUT_GPU", nvidia(*architecture))
        texts.append(program(operand(form, 256, 512), operand(form, 384, 512)))
    # Five matrix descriptors for each of six programs, as a result after the product.
    workspace = f"-> (tensor<256x384xbf16>, tensor<{6 * 5 * 128}xui8>)"
    assert [text.count(workspace) for text in texts] == [1, 0]


@needs_bridge
def test_without_kernels_xla_is_handed_the_scaled_product(monkeypatch):
    monkeypatch.setattr(platform, "WITHOUT_GPU", nvidia(10, 0))
    monkeypatch.setattr(launching, "kernels_unsupported_reason", lambda: "triton is not installed")
    for form in (MXFP8, NVFP4):
        text = program(operand(form, 256, 512), operand(form, 384, 512))
        assert text.count("__op$block_scaled_dot") == 1 and "triton_kernel_call_ffi" not in text
        (call,) = re.findall(r"custom_call @__op.*", text)
        a, b = (
            jax.ShapeDtypeStruct((1, *extents), dtype)
            for extents, dtype in (((256, 512), operand(form, 1, 512).codes.dtype),) * 2
        )
        scale = operand(form, 256, 512).scale
        scale = jax.ShapeDtypeStruct((1, *scale.shape), scale.dtype)
        dtype = BFLOAT16 if form == MXFP8 else jnp.float32
        public = jax.jit(
            lambda *arrays, dtype=dtype: jax.nn.scaled_matmul(*arrays, preferred_element_type=dtype)
        )
        text = public.trace(a, b, scale, scale).lower(lowering_platforms=("cuda",)).as_text()
        (expected,) = re.findall(r"custom_call @__op.*", text)
        settings = [re.findall(r"backend_config = (\S+)", line) for line in (call, expected)]
        assert len(settings[0]) == 1 and settings[0] == settings[1]


@needs_bridge
def test_under_vmap_every_element_is_a_product(monkeypatch):
    monkeypatch.setattr(platform, "WITHOUT_GPU", nvidia(10, 0))
    a, b = operand(MXFP8, 256, 512), operand(MXFP8, 384, 512)
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), a)
    traced = jax.jit(jax.vmap(lambda a, b: gemm(a, b, BFLOAT16), in_axes=(0, None))).trace(
        stacked, b
    )
    assert "triton_kernel_call_ffi" in traced.lower(lowering_platforms=("cuda",)).as_text()
