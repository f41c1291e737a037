"""GELU and biases after block-scaled products: cuBLASLt's plans, Triton's row, a separate bias."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.primitives.cublaslt_on_cpu import install
from tests.primitives.test_swizzled_products import (
    BLOCK_1D,
    BLOCK_2D,
    MXFP8,
    PAIRS,
    dequantize_operand,
    quantized,
)
from transformer_engine.common import optional
from transformer_engine.common.dispatch import PlanFailure
from transformer_engine.common.hardware import nvidia
from transformer_engine.common.kernels import launch
from transformer_engine.pytorch.primitives.gemm import (
    TABLE,
    Epilogue,
    cublaslt,
    cublaslt_fused,
    fused,
    triton_fused,
)
from transformer_engine.pytorch.primitives.gemm.composed import (
    CODES,
    GELU,
    GELU_GRADIENT,
    FusedRequest,
)
from transformer_engine.pytorch.primitives.gemm.request import GemmRequest

BF16 = torch.bfloat16


@pytest.fixture
def library(monkeypatch):
    return install(monkeypatch)


@pytest.fixture
def with_triton(monkeypatch):
    monkeypatch.setattr(launch, "unavailable_reason", lambda hardware: None)
    monkeypatch.setattr(optional, "release", lambda name: (3, 8))


BLACKWELL = nvidia(10, 0)


def fused_gpu_request(
    kind, a, b, epilogue, second=False, x=None, hardware=BLACKWELL
) -> FusedRequest:
    """The request as it would be for the same tensors on a GPU."""
    request = FusedRequest.of(kind, a, b, epilogue, second, x, None if x is None else x.dtype)
    product = dataclasses.replace(request.product, device="cuda", hardware=hardware, index=0)
    return dataclasses.replace(request, product=product)


def remove_libraries(monkeypatch):
    monkeypatch.setattr(
        cublaslt.library, "unavailable_reason", lambda: "nvmath-python is not installed"
    )
    monkeypatch.delattr(torch.nn.functional, "scaled_mm")


@pytest.mark.parametrize("pair", ["mxfp8", "nvfp4", "powers"])
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("keeps", [True, False], ids=["x", ""])
def test_cublaslt_computes_gelu_after_swizzled_scales(library, pair, biased, keeps):
    a, b = PAIRS[pair]()
    epilogue = Epilogue(BF16, torch.randn(b.rows) if biased else None)
    request = fused_gpu_request(GELU, a, b, epilogue, keeps)
    assert cublaslt_fused.unsupported_reason(request) is None
    call = cublaslt_fused.bind(request)
    assert not isinstance(call, PlanFailure)
    y, x = call(a, b, epilogue)
    exact = dequantize_operand(a) @ dequantize_operand(b).t() + (
        0.0 if epilogue.bias is None else epilogue.bias.to(BF16).float()
    )
    bound = (
        2.0**-7 * exact.abs()
        + 1e-4 * (dequantize_operand(a).abs() @ dequantize_operand(b).abs().t())
        + 1e-3
    )
    assert ((y.float() - torch.nn.functional.gelu(exact, approximate="tanh")).abs() <= bound).all()
    assert (x is None) is not keeps
    assert x is None or ((x.float() - exact).abs() <= bound).all()
    assert library.started


def test_gelus_gradient_is_quantized_in_a_separate_kernel(library):
    a, b = PAIRS["mxfp8"]()
    x = torch.randn(a.rows, b.rows).to(BF16)
    reason = cublaslt_fused.unsupported_reason(
        fused_gpu_request(GELU_GRADIENT, a, b, Epilogue(BF16), False, x)
    )
    assert "the gradient of GELU takes twice as long" in str(reason)
    blocks = quantized(BLOCK_1D, 32, 128), quantized(BLOCK_2D, 128, 128)
    reason = cublaslt_fused.unsupported_reason(
        fused_gpu_request(GELU, *blocks, Epilogue(BF16), hardware=nvidia(9, 0))
    )
    assert "no activation to products of block scales" in str(reason)


def test_triton_computes_gelu_if_it_computes_the_product(with_triton, monkeypatch):
    a, b = PAIRS["mxfp8"]()
    x = torch.randn(a.rows, b.rows).to(BF16)
    gelu, gradient = (
        fused_gpu_request(GELU, a, b, Epilogue(BF16)),
        fused_gpu_request(GELU_GRADIENT, a, b, Epilogue(BF16), False, x),
    )
    for request in (gelu, gradient):
        assert "scaled_mm_swizzled computes the product" in str(
            triton_fused.unsupported_reason(request)
        )
    remove_libraries(monkeypatch)
    for request in (gelu, gradient):
        assert fused.TABLE.chosen(request) == "triton"
    sparse = fused_gpu_request(
        GELU_GRADIENT, a, b, Epilogue(BF16), False, torch.randn(b.rows, a.rows).to(BF16).t()
    )
    assert triton_fused.unsupported_reason(sparse) == "the activation's input is not contiguous"
    assert (
        triton_fused.BACKEND.rejection_reason(fused_gpu_request(CODES, a, b, Epilogue(BF16)))
        is not None
    )
    wide = fused_gpu_request(GELU, a, b, Epilogue(BF16), hardware=nvidia(9, 0))
    assert "no mxfp8 products" in str(triton_fused.unsupported_reason(wide))


def gpu_request(a, b, epilogue: Epilogue) -> GemmRequest:
    request = GemmRequest.of(a, b, epilogue)
    return dataclasses.replace(request, device="cuda", hardware=BLACKWELL, index=0)


@pytest.mark.parametrize("accumulates", [False, True], ids=["", "added"])
@pytest.mark.parametrize("pair", ["mxfp8", "nvfp4"])
def test_a_bias_without_an_algorithm_is_added_to_the_float32_product(
    library, monkeypatch, pair, accumulates
):
    heuristic = library.matmul_algo_get_heuristic

    def drop_bias(handle, descriptor, *rest):
        if "BIAS_POINTER" in library.alive[descriptor]:
            raise library.cuBLASLtError("NOT_SUPPORTED")
        heuristic(handle, descriptor, *rest)

    monkeypatch.setattr(library, "matmul_algo_get_heuristic", drop_bias)
    a, b = PAIRS[pair]()
    out = torch.full((a.rows, b.rows), 2.0) if accumulates else None
    bias = torch.randn(b.rows)
    epilogue = Epilogue(BF16, bias.to(BF16), out, accumulates)
    request = gpu_request(a, b, epilogue)
    assert "NOT_SUPPORTED" in cublaslt.bind(request).reason  # pyright: ignore
    TABLE.forget()
    result = TABLE.bind(request)(a, b, epilogue)
    verdicts = {verdict.backend: verdict for verdict in TABLE.explain(request)}
    assert "NOT_SUPPORTED" in str(verdicts["cublaslt"].reason)
    assert verdicts["cublaslt_before_bias"].chosen
    exact = (
        dequantize_operand(a).double() @ dequantize_operand(b).double().t()
        + bias.to(BF16).double()
        + 2.0 * accumulates
    )
    size = dequantize_operand(a).abs() @ dequantize_operand(b).abs().t() + 1.0
    rounding = 0.0 if accumulates else 2.0**-8 * exact.abs()  # the sum is rounded once
    assert ((result.double() - exact).abs() <= 2e-6 * size + rounding).all()
    TABLE.forget()


def test_products_without_a_bias_have_no_second_plan(library):
    a, b = quantized(MXFP8, 32, 64), quantized(MXFP8, 32, 64)
    request = gpu_request(a, b, Epilogue(BF16))
    assert cublaslt.BEFORE_BIAS.rejection_reason(request) == "there is no bias"
    library.algorithms = []
    biased = gpu_request(a, b, Epilogue(BF16, torch.randn(32)))
    assert isinstance(cublaslt.bind_before_bias(biased), PlanFailure)
