"""One test body for every product backend: a rejection reason, or the float32 reference's result."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from transformer_engine.common import formats
from transformer_engine.common.dispatch import Unsupported, use_backend
from transformer_engine.common.hardware import nvidia
from transformer_engine.pytorch.primitives.gemm import TABLE, Epilogue, gemm, plain
from transformer_engine.pytorch.primitives.gemm.request import GemmRequest
from transformer_engine.pytorch.primitives.operand import Operand
from transformer_engine.pytorch.primitives.quantize import QuantizeSpec, dequantize, quantize

SPECS = {
    "float8": QuantizeSpec(formats.FLOAT8, formats.E4M3),
    "float8_e5m2": QuantizeSpec(formats.FLOAT8, formats.E5M2),
    "block1d": QuantizeSpec(formats.BLOCK_1D, formats.E4M3, power_of_two=True),
    "block2d": QuantizeSpec(formats.BLOCK_2D, formats.E4M3, power_of_two=True),
    "mxfp8": QuantizeSpec(formats.MXFP8, formats.E4M3),
    "nvfp4": QuantizeSpec(formats.NVFP4, formats.E2M1),
}
PAIRS = [
    ("float8", "float8"),
    ("float8_e5m2", "float8"),
    ("block1d", "block2d"),
    ("block1d", "block1d"),
    ("mxfp8", "mxfp8"),
    ("nvfp4", "nvfp4"),
    ("float8", None),
]
FP8_TENSOR_CORES = (
    "cublaslt",
    "cublaslt_before_bias",
    "scaled_mm",
    "scaled_mm_block",
    "scaled_mm_swizzled",
    "triton",
)
SIZES = [(16, 32, 64), (128, 256, 128), (17, 48, 80), (1, 16, 256), (130, 144, 384)]


def operand(name: str | None, rows: int, depth: int, device: str) -> Operand:
    values = torch.randn(rows, depth, device=device)
    values[0] *= 30.0
    if name is None:
        return plain(values.bfloat16())
    spec = SPECS[name]
    q = quantize(values.bfloat16(), spec)
    return Operand(
        q.codes,
        q.scale,
        spec.format,
        q.amax if spec.format == formats.NVFP4 else None,
        torch.bfloat16,
    )


def dequantize_operand(x: Operand) -> torch.Tensor:
    if x.format is None:
        return x.codes.double()
    return dequantize(x._replace(dtype=torch.float32)).double()


def error_bound(a: Operand, b: Operand, tensor_cores: bool) -> torch.Tensor:
    """Error relative to sum |a||b|: Hopper's FP8 tensor cores truncate terms to about 13 bits, float32 keeps 24."""
    return (dequantize_operand(a).abs() @ dequantize_operand(b).abs().t()) * (
        2.0**-11 if tensor_cores else 2.0**-18
    ) + 1e-30


@pytest.mark.parametrize("backend", TABLE.names())
@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p[0]}x{p[1]}")
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_backend_rejects_or_meets_the_exact_product(backend, pair, size, device):
    m, n, k = size
    a, b = operand(pair[0], m, k, device), operand(pair[1], n, k, device)
    epilogue = Epilogue(torch.float32)
    request = GemmRequest.of(a, b, epilogue)
    if reason := TABLE.named(backend).unsupported_reason(request):
        pytest.skip(f"{backend}: {reason}")
    with use_backend(gemm=backend):
        out = gemm(a, b, epilogue).double()
    exact = dequantize_operand(a) @ dequantize_operand(b).t()
    assert (
        (out - exact).abs()
        <= error_bound(a, b, backend in FP8_TENSOR_CORES and a.format is not None)
    ).all()


@pytest.mark.parametrize("name", [None, "float8", "block1d", "mxfp8"])
def test_bias_is_added_in_the_epilogue(name, device):
    a = operand(name, 32, 64, device)
    b = operand("block2d" if name == "block1d" else name, 48, 64, device)
    bias = torch.randn(48, device=device).bfloat16()
    out = gemm(a, b, Epilogue(torch.bfloat16, bias=bias))
    exact = dequantize_operand(a) @ dequantize_operand(b).t() + bias.double()
    bound = error_bound(a, b, name is not None and out.is_cuda) + 2.0**-7 * exact.abs() + 1e-3
    assert ((out.double() - exact).abs() <= bound).all()


def test_block_aligned_products_support_a_bias(device):
    a, b = operand("block1d", 32, 128, device), operand("block2d", 128, 128, device)
    bias = torch.randn(128, device=device).bfloat16()
    out = gemm(a, b, Epilogue(torch.bfloat16, bias=bias))
    exact = dequantize_operand(a) @ dequantize_operand(b).t() + bias.double()
    assert (
        (out.double() - exact).abs()
        <= error_bound(a, b, out.is_cuda) + 2.0**-7 * exact.abs() + 1e-3
    ).all()


@pytest.mark.parametrize("name", [None, "float8"])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_out_receives_or_accumulates(name, out_dtype, device):
    a, b = operand(name, 32, 64, device), operand(name, 48, 64, device)
    exact = dequantize_operand(a) @ dequantize_operand(b).t()
    out = torch.full((32, 48), 5.0, device=device, dtype=out_dtype)
    assert gemm(a, b, Epilogue(torch.bfloat16, out=out)) is out
    rounding = (2.0**-8 if out_dtype == torch.bfloat16 else 2.0**-20) * exact.abs()
    bound = error_bound(a, b, name == "float8" and out.is_cuda) + rounding
    assert ((out.double() - exact).abs() <= bound).all()
    gemm(a, b, Epilogue(torch.bfloat16, out=out, accumulate=True))
    assert ((out.double() - 2 * exact).abs() <= 2 * bound + 2 * rounding).all()


def test_a_float32_result_from_bf16_operands_is_not_rounded_to_bf16(device):
    a, b = operand(None, 32, 64, device), operand(None, 48, 64, device)
    out = gemm(a, b, Epilogue(torch.float32))
    exact = dequantize_operand(a) @ dequantize_operand(b).t()
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("size", [(0, 16, 16), (16, 0, 16), (16, 16, 0)], ids=str)
def test_an_empty_product_is_zero(size, device):
    m, n, k = size
    out = gemm(
        plain(torch.ones(m, k, device=device)),
        plain(torch.ones(n, k, device=device)),
        Epilogue(torch.float32),
    )
    assert out.shape == (m, n)
    assert not out.any()


def test_operands_that_contract_different_extents_are_rejected(device):
    with pytest.raises(ValueError, match="contract 8 and 9"):
        gemm(
            plain(torch.ones(2, 8, device=device)),
            plain(torch.ones(2, 9, device=device)),
            Epilogue(torch.float32),
        )


def test_a_forced_backend_raises_its_reason():
    a = operand("float8", 16, 16, "cpu")
    with use_backend(gemm="widen"), pytest.raises(Unsupported, match="for GPUs"):
        gemm(a, a, Epilogue(torch.float32))


def test_every_rejection_is_a_sentence():
    a = operand("block2d", 16, 16, "cpu")
    for verdict in TABLE.explain(GemmRequest.of(a, a, Epilogue(torch.float32))):
        assert verdict.chosen == (verdict.backend == "reference")
        assert verdict.chosen or len(verdict.reason) > 10


@pytest.mark.parametrize("b_format", [formats.BLOCK_2D, formats.BLOCK_1D])
def test_torch_rejects_e5m2_operands_in_blocks(b_format):
    operands = operand("block1d", 256, 256, "cpu"), operand("block1d", 256, 256, "cpu")
    request = dataclasses.replace(
        GemmRequest.of(*operands, Epilogue(torch.bfloat16)),
        device="cuda",
        hardware=nvidia(9, 0),
        a_element=torch.float8_e5m2,
        b_format=b_format,
    )
    assert "not support E5M2 operands" in str(
        TABLE.named("scaled_mm_block").unsupported_reason(request)
    )
