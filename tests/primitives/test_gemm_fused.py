"""Products with a fused operation: all backends against float64, cuBLASLt's descriptors and unsupported requests."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from functools import partial

import pytest
import torch

from tests.primitives.cublaslt_on_cpu import install
from transformer_engine.common import formats
from transformer_engine.common.dispatch import PlanFailure, observing, use_backend
from transformer_engine.common.hardware import nvidia
from transformer_engine.pytorch.primitives.gemm import (
    Epilogue,
    GemmRequest,
    cublaslt_fused,
    cublaslt_plan,
    fused,
    gemm,
    gemm_gelu,
    gemm_gelu_gradient,
    plain,
)
from transformer_engine.pytorch.primitives.gemm.composed import (
    CODES,
    GELU,
    GELU_GRADIENT,
    FusedRequest,
)
from transformer_engine.pytorch.primitives.gemm.request import MatrixLayout
from transformer_engine.pytorch.primitives.operand import Operand
from transformer_engine.pytorch.primitives.quantize import (
    Cast,
    QuantizeSpec,
    dequantize,
    quantize,
    torch_dtype,
)

BF16 = torch.bfloat16
M, N, K = 64, 96, 128
ELEMENTS = {"e4m3": formats.E4M3, "e5m2": formats.E5M2}


def operand(rows, depth, device, element=None, dtype=BF16) -> Operand:
    values = torch.randn(rows, depth, device=device).to(dtype)
    if element is None:
        return plain(values)
    q = quantize(values, QuantizeSpec(formats.FLOAT8, element))
    return Operand(q.codes, q.scale, formats.FLOAT8, None, dtype)


def dequantize_operand(x: Operand) -> torch.Tensor:
    return (
        x.codes.double()
        if x.format is None
        else dequantize(x._replace(dtype=torch.float32)).double()
    )


def make_cast(element, multiplier, record=None) -> Cast:
    return Cast(QuantizeSpec(formats.FLOAT8, element), multiplier, record)


def gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def slope(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(gelu(x).sum(), x)[0]


def take(backend: str, kind: str, a, b, epilogue, second, x=None, dtype=None) -> None:
    """Skip if the backend does not support the request."""
    request = FusedRequest.of(kind, a, b, epilogue, second, x, dtype)
    if reason := fused.TABLE.named(backend).rejection_reason(request):
        pytest.skip(f"{backend}: {reason}")


BACKENDS = pytest.mark.parametrize("backend", fused.TABLE.names())
OPERANDS = pytest.mark.parametrize("element", [None, formats.E4M3], ids=["bf16", "float8"])


def lost(a: Operand, b: Operand) -> torch.Tensor:
    """Error bound for a sum: Hopper's FP8 tensor cores truncate terms to about 13 bits."""
    return (dequantize_operand(a).abs() @ dequantize_operand(b).abs().t()) * 2.0**-11


def close(
    got: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor | float = 0.0, slack=1e-6
) -> None:
    """Assert an error of at most two bfloat16 roundings, one in the input `rounded`, and `slack`."""
    bound = 2.0**-7 * exact.abs() + 2.0**-8 * rounded + slack
    assert ((got.double() - exact).abs() <= bound).all(), float(
        ((got.double() - exact).abs() / bound).max()
    )


@BACKENDS
@OPERANDS
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("keeps", [True, False], ids=["x", ""])
def test_gelu_follows_the_product_and_its_input_is_kept(backend, element, biased, keeps, device):
    a, b = operand(M, K, device, element), operand(N, K, device, element)
    bias = torch.randn(N, device=device).to(BF16) if biased else None
    epilogue = Epilogue(BF16, bias)
    take(backend, GELU, a, b, epilogue, keeps)
    with use_backend(gemm_epilogue=backend):
        y, x = gemm_gelu(a, b, epilogue, keeps)
    exact = dequantize_operand(a) @ dequantize_operand(b).t() + (
        0.0 if bias is None else bias.double()
    )
    slack = 1.2 * lost(a, b)  # the slope of GELU is less than 1.13
    close(y, gelu(exact), exact.abs(), slack)
    assert (x is None) is not keeps
    if x is not None:
        close(x, exact, slack=slack)
        assert x.dtype == y.dtype == BF16 and x.is_contiguous()


@BACKENDS
@OPERANDS
def test_the_gradient_of_gelu_follows_the_product(backend, element, device):
    a, b = operand(M, K, device, element), operand(N, K, device, element)
    x = torch.randn(M, N, device=device).to(BF16)
    take(backend, GELU_GRADIENT, a, b, Epilogue(BF16), False, x, BF16)
    with use_backend(gemm_epilogue=backend):
        dx = gemm_gelu_gradient(a, b, x, Epilogue(BF16))
    product = dequantize_operand(a) @ dequantize_operand(b).t()
    exact = product * slope(x.double())
    close(dx, exact, product.abs(), 1.2 * lost(a, b))
    assert dx.dtype == BF16 and dx.is_contiguous()


@BACKENDS
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
def test_codes_are_the_scaled_product_and_the_maximum_is_unscaled(backend, element, biased, device):
    e = ELEMENTS[element]
    a, b = operand(M, K, device, e), operand(N, K, device, formats.E4M3)
    bias = torch.randn(N, device=device).to(BF16) if biased else None
    epilogue = Epilogue(BF16, bias)
    exact = dequantize_operand(a) @ dequantize_operand(b).t() + (
        0.0 if bias is None else bias.double()
    )
    take(backend, CODES, a, b, epilogue, second=True, x=None, dtype=torch_dtype(e))
    for scale in (
        0.25,
        4.0,
        1000.0,
    ):  # neither 1, where dividing by it would not be noticed, nor all in range
        record = torch.zeros(1, device=device)
        with use_backend(gemm_epilogue=backend):
            result = gemm(
                a, b, epilogue, make_cast(e, torch.tensor([scale], device=device), record)
            )
        codes = result.codes
        assert result.scale.item() == pytest.approx(1.0 / scale)
        maximum = torch.finfo(codes.dtype).max
        scaled = (exact * scale).clamp(-maximum, maximum)
        # rounding, once to bfloat16 before where apart
        step = 2.0**-3 if element == "e4m3" else 2.0**-2
        error = (codes.double() - scaled).abs()
        assert (error <= step * scaled.abs() + 2.0**-8 + scale * (2.0**-8 + lost(a, b))).all()
        assert codes.dtype == torch_dtype(e)
        torch.testing.assert_close(
            record.double(), exact.abs().max().view(1), rtol=2.0**-7, atol=0.0
        )


@BACKENDS
def test_the_recorded_maximum_only_grows(backend, device):
    a, b = operand(M, K, device, formats.E4M3), operand(N, K, device, formats.E4M3)
    take(backend, CODES, a, b, Epilogue(BF16), second=True, x=None, dtype=torch.float8_e4m3fn)
    one = torch.ones(1, device=device)
    history = torch.tensor([[0.0, 1e-3, 1e6, 0.0]], device=device)
    with use_backend(gemm_epilogue=backend):
        for i in (1, 2):
            gemm(a, b, Epilogue(BF16), make_cast(formats.E4M3, one, history[0, i : i + 1]))
        unrecorded = gemm(a, b, Epilogue(BF16), make_cast(formats.E4M3, one)).codes
    largest = float((dequantize_operand(a) @ dequantize_operand(b).t()).abs().max())
    assert history[0, 1].item() == pytest.approx(largest, rel=2.0**-7)
    assert history[0, [0, 2, 3]].tolist() == [0.0, 1e6, 0.0]
    assert unrecorded.dtype == torch.float8_e4m3fn


CASTS = {
    "current": QuantizeSpec(formats.FLOAT8, formats.E4M3),
    "both directions": QuantizeSpec(formats.FLOAT8, formats.E5M2, columnwise=True),
    "blocks": QuantizeSpec(formats.BLOCK_1D, formats.E4M3, columnwise=True),
    "mxfp8": QuantizeSpec(formats.MXFP8, formats.E4M3),
}


@pytest.mark.parametrize("spec", CASTS.values(), ids=CASTS)
@pytest.mark.parametrize("argument", [False, True], ids=["", "multiplier"])
def test_a_product_with_a_cast_equals_the_quantized_product(spec, argument, device):
    if argument and spec.format.block is not None:
        pytest.skip("blocks make their own scales")
    a, b, bias = (
        operand(M, K, device),
        operand(N, K, device),
        torch.randn(N, device=device).to(BF16),
    )
    cast = Cast(spec, torch.tensor([3.0], device=device) if argument else None)
    result = gemm(a, b, Epilogue(BF16, bias), cast)
    expected = quantize(gemm(a, b, Epilogue(BF16, bias)), spec, multiplier=cast.multiplier)
    for actual, reference in zip(result[:4], expected[:4], strict=True):
        assert (actual is None) == (reference is None)
        assert actual is None or torch.equal(actual.float(), reference.float())


@pytest.mark.parametrize("sizes", [(0, 16, 16), (16, 0, 16), (16, 16, 0)], ids=str)
def test_an_empty_product_has_results_with_the_right_shapes(sizes, device):
    m, n, k = sizes
    a, b = (plain(torch.ones(rows, k, device=device, dtype=BF16)) for rows in (m, n))
    y, x = gemm_gelu(a, b, Epilogue(BF16))
    dx = gemm_gelu_gradient(a, b, torch.ones(m, n, device=device, dtype=BF16), Epilogue(BF16))
    assert y.shape == x.shape == dx.shape == (m, n)
    assert not y.any() and not dx.any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda a, b: gemm_gelu(a, b, Epilogue(BF16, out=a.codes.new_empty(M, N))),
            "leave epilogue.out out",
        ),
        (
            lambda a, b: gemm_gelu(a, b, Epilogue(BF16, a.codes.new_empty(7))),
            r"bias has shape \(7,\)",
        ),
        (
            lambda a, b: gemm_gelu(a, plain(b.codes[:, 1:]), Epilogue(BF16)),
            f"contract {K} and {K - 1}",
        ),
        (lambda a, b: gemm_gelu_gradient(a, b, a.codes, Epilogue(BF16)), rf"must be \({M}, {N}\)"),
        (
            lambda a, b: gemm_gelu_gradient(a, b, a.codes, Epilogue(BF16, a.codes.new_empty(N))),
            "no bias to add",
        ),
    ],
    ids=["out", "bias", "depth", "x", "gradient bias"],
)
def test_inputs_that_do_not_fit_are_rejected(call, message, device):
    with pytest.raises(ValueError, match=message):
        call(operand(M, K, device), operand(N, K, device))


def test_a_choice_is_cached_by_its_inputs(monkeypatch, device):
    records, describe = [], fused.TABLE.describe
    monkeypatch.setattr(fused.TABLE, "describe", lambda *key: records.append(key) or describe(*key))
    fused.TABLE.forget()
    a, b = operand(M, K, device), operand(N, K, device)
    x = torch.randn(M, N, device=device).to(BF16)
    one, quantized = torch.ones(1, device=device), operand(N, K, device, formats.E4M3)
    codes = partial(gemm, operand(M, K, device, formats.E4M3), quantized, Epilogue(BF16))
    calls = [
        lambda: gemm_gelu(a, b, Epilogue(BF16)),
        lambda: gemm_gelu(a, b, Epilogue(BF16), False),
        lambda: gemm_gelu_gradient(a, b, x, Epilogue(BF16)),
        lambda: gemm_gelu_gradient(a, b, x.t().contiguous().t(), Epilogue(BF16)),
        lambda: codes(make_cast(formats.E4M3, one)),
        lambda: codes(make_cast(formats.E4M3, one, one.clone())),
        lambda: codes(make_cast(formats.E5M2, one)),
    ]
    for _ in range(2):
        for call in calls:
            call()
    assert len(records) == len(calls)


@pytest.mark.parametrize("choice", [{"gemm": "reference"}, {"activation": "reference"}], ids=str)
def test_a_backend_forced_for_one_step_is_used_for_it(choice, device):
    a, b = operand(M, K, device), operand(N, K, device)
    records = []
    with use_backend(**choice), observing(lambda operation, request: records.append(operation)):
        gemm_gelu(a, b, Epilogue(BF16))
    assert records == ["gemm_epilogue", "gemm", "activation"]


def test_graph_operators_equal_eager_mode(device):
    a, b = operand(M, K, device), operand(N, K, device)
    x, bias = torch.randn(M, N, device=device).to(BF16), torch.randn(N, device=device).to(BF16)
    tensors = (a.codes, None, None, None, b.codes, None, None, None)
    for keeps in (True, False):
        result = fused._product_gelu_now(*tensors, bias, BF16, True, keeps)
        fake = fused._product_gelu.results(*tensors, bias, BF16, True, keeps)
        expected = gemm_gelu(a, b, Epilogue(BF16, bias), keeps)
        assert [(t.shape, t.dtype) for t in fake] == [(t.shape, t.dtype) for t in result]
        assert all(torch.equal(t, e) for t, e in zip(result, expected, strict=False))
    result = fused._product_gelu_gradient_now(*tensors, x, BF16, True)
    fake = fused._product_gelu_gradient.results(*tensors, x, BF16, True)
    assert (fake.shape, fake.dtype) == (result.shape, result.dtype)
    assert torch.equal(result, gemm_gelu_gradient(a, b, x, Epilogue(BF16)))


def test_a_compiled_graph_is_bitwise_equal_to_eager_mode(device):
    a, b = operand(M, K, device), operand(N, K, device)
    bias = torch.randn(N, device=device).to(BF16)

    def step(a_codes, b_codes, x):
        y, saved = gemm_gelu(plain(a_codes), plain(b_codes), Epilogue(BF16, bias))
        return y, saved, gemm_gelu_gradient(plain(a_codes), plain(b_codes), x, Epilogue(BF16))

    x = torch.randn(M, N, device=device).to(BF16)
    eager = step(a.codes, b.codes, x)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(a.codes, b.codes, x)
    assert all(torch.equal(e, c) for e, c in zip(eager, compiled, strict=True))


@pytest.fixture
def library(monkeypatch):
    return install(monkeypatch)


def h200_request(kind, a, b, epilogue, second, x=None, dtype=None, **change) -> FusedRequest:
    """The request as it would be for the same tensors on an H200."""
    request = FusedRequest.of(kind, a, b, epilogue, second, x, dtype)
    product = dataclasses.replace(
        request.product, device="cuda", hardware=nvidia(9, 0), index=0, **change
    )
    return dataclasses.replace(request, product=product)


@OPERANDS
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_a_plan_describes_gelu(library, element, biased, dtype):
    a, b = operand(M, K, "cpu", element, dtype), operand(N, K, "cpu", element, dtype)
    epilogue = Epilogue(dtype, torch.randn(N) if biased else None)
    exact = dequantize_operand(a) @ dequantize_operand(b).t() + (
        0.0 if not biased else epilogue.bias.to(dtype).double()
    )
    for keeps in (True, False):
        request = h200_request(GELU, a, b, epilogue, keeps)
        assert cublaslt_fused.unsupported_reason(request) is None
        y, x = cublaslt_fused.bind(request)(a, b, epilogue)
        close(y, gelu(exact), slack=1e-4)
        assert (x is None) is not keeps
        if x is not None:
            close(x, exact, slack=1e-4)
    assert library.started


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_a_plan_describes_gelus_gradient(library, dtype):
    a, b = operand(M, K, "cpu", None, dtype), operand(N, K, "cpu", None, dtype)
    x = torch.randn(M, N + 8).to(dtype)[:, :N]
    request = h200_request(GELU_GRADIENT, a, b, Epilogue(dtype), False, x, dtype)
    assert cublaslt_fused.unsupported_reason(request) is None
    dx = cublaslt_fused.bind(request)(a, b, Epilogue(dtype), x)
    close(dx, dequantize_operand(a) @ dequantize_operand(b).t() * slope(x.double()), slack=1e-4)
    assert library.started


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_a_plan_describes_codes_and_their_maximum(library, dtype):
    a, b = operand(M, K, "cpu", formats.E4M3, dtype), operand(N, K, "cpu", formats.E4M3, dtype)
    bias = torch.randn(N).to(torch.float16 if dtype == torch.float16 else BF16)
    epilogue = Epilogue(dtype, bias)
    exact = dequantize_operand(a) @ dequantize_operand(b).t() + bias.double()
    request = h200_request(CODES, a, b, epilogue, second=True, x=None, dtype=torch.float8_e4m3fn)
    assert cublaslt_fused.unsupported_reason(request) is None
    record = torch.tensor([1e-3])
    codes = cublaslt_fused.bind(request)(
        a, b, epilogue, make_cast(formats.E4M3, torch.tensor([16.0]), record)
    ).codes
    expected = (exact * 16.0).clamp(-448.0, 448.0)
    assert ((codes.double() - expected).abs() <= 2.0**-4 * expected.abs() + 2.0**-9).all()
    assert float(record) == pytest.approx(float(exact.abs().max()), rel=1e-5)
    plain_request = h200_request(
        CODES, a, b, epilogue, second=False, x=None, dtype=torch.float8_e4m3fn
    )
    repeated = cublaslt_fused.bind(plain_request)(
        a, b, epilogue, make_cast(formats.E4M3, torch.tensor([16.0]))
    ).codes
    assert torch.equal(codes.view(torch.uint8), repeated.view(torch.uint8))


def matrix_with_alignment(rows: int, columns: int, by: int) -> torch.Tensor:
    """A bfloat16 matrix whose address is a multiple of `by` bytes and of no more."""
    memory = torch.randn(rows * columns + 256).to(BF16)
    first = (-memory.data_ptr() % 256 + by) // 2
    return memory[first : first + rows * columns].view(rows, columns)


def alignments(library, monkeypatch) -> list[int]:
    """A list that records the alignment in each later request for algorithms."""
    queries: list[int] = []
    heuristic = library.matmul_algo_get_heuristic

    def asking(handle, descriptor, a, b, c, d, preference, *rest):
        queries.append(library.alive[preference]["MIN_ALIGNMENT_A_BYTES"])
        heuristic(handle, descriptor, a, b, c, d, preference, *rest)

    monkeypatch.setattr(library, "matmul_algo_get_heuristic", asking)
    return queries


@pytest.mark.parametrize("by", [16, 32, 128])
def test_a_slice_has_a_plan_for_its_alignment(library, monkeypatch, by):
    a, b, x = (
        plain(matrix_with_alignment(M, K, by)),
        operand(N, K, "cpu"),
        matrix_with_alignment(M, N, by),
    )
    requested = alignments(library, monkeypatch)
    y, saved = cublaslt_fused.bind(h200_request(GELU, a, b, Epilogue(BF16), True))(
        a, b, Epilogue(BF16)
    )
    gradient = cublaslt_fused.bind(
        h200_request(GELU_GRADIENT, a, b, Epilogue(BF16), False, x, BF16)
    )
    dx = gradient(a, b, Epilogue(BF16), x)
    gradient(a, b, Epilogue(BF16), x)
    assert len(requested) == 4 and requested[::2] == [256, 256] and max(requested[1::2]) <= by
    assert len(library.started) == 3
    product = dequantize_operand(a) @ dequantize_operand(b).t()
    close(saved, product, slack=1e-4)
    close(y, gelu(product), slack=1e-4)
    close(dx, product * slope(x.double()), slack=1e-4)


@pytest.mark.parametrize("reason", ["less than 16 bytes", "no algorithm for less than 256"])
def test_matrices_without_a_plan_take_separate_steps(library, monkeypatch, reason):
    a, b = (
        plain(matrix_with_alignment(M, K, 2 if reason == "less than 16 bytes" else 16)),
        operand(N, K, "cpu"),
    )
    gelu_call = cublaslt_fused.bind(h200_request(GELU, a, b, Epilogue(BF16), True))
    x = torch.randn(M, N).to(BF16)
    gradient = cublaslt_fused.bind(
        h200_request(GELU_GRADIENT, a, b, Epilogue(BF16), False, x, BF16)
    )
    if reason != "less than 16 bytes":
        library.algorithms = []
    y, saved = gelu_call(a, b, Epilogue(BF16))
    dx = gradient(a, b, Epilogue(BF16), x)
    assert not library.started
    product = dequantize_operand(a) @ dequantize_operand(b).t()
    close(saved, product, slack=1e-4)
    close(y, gelu(product), product.abs(), slack=1e-4)
    close(dx, product * slope(x.double()), product.abs(), slack=1e-4)


def test_matrices_without_a_plan_are_freed(library):
    a, b = plain(matrix_with_alignment(M, K, 16)), operand(N, K, "cpu")
    gelu_call = cublaslt_fused.bind(h200_request(GELU, a, b, Epilogue(BF16), True))
    library.algorithms = []
    alive = []
    for _ in range(2):
        a = plain(matrix_with_alignment(M, K, 16))
        alive.append(weakref.ref(a.codes))
        gelu_call(a, b, Epilogue(BF16))
        del a
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_descriptors_are_reused_and_destroyed_with_their_plan(library):
    a, b = operand(M, K, "cpu", formats.E4M3), operand(N, K, "cpu", formats.E4M3)
    request = h200_request(
        CODES, a, b, Epilogue(BF16), second=False, x=None, dtype=torch.float8_e4m3fn
    )
    one, alive = torch.ones(1), []
    for _ in range(3):
        cublaslt_fused.bind(request)(a, b, Epilogue(BF16), make_cast(formats.E4M3, one))
        alive.append(len(library.alive))
    assert alive[1] == alive[2]
    cublaslt_fused.cublaslt.find_plan(request.product)  # another problem, whose plan stays
    cublaslt_plan._plans.clear()
    assert not library.alive


QUANTIZED = {"a_format": formats.BLOCK_1D, "b_format": formats.BLOCK_1D}
REJECTIONS = {
    "needs a CUDA device": (GELU, {"device": "cpu"}),
    "saved in bfloat16 or float16": (GELU, {"dtype": torch.float32}),
    "N=100 is not a multiple of 8": (GELU, {"n": 100}),
    "no activation to products of block scales": (
        GELU,
        {**QUANTIZED, "a_element": torch.float8_e4m3fn, "b_element": torch.float8_e4m3fn},
    ),
    "supported: one dtype": (GELU_GRADIENT, {"dtype": torch.float16, "a_element": torch.float16}),
    "one scale per tensor": (CODES, {}),
}


@pytest.mark.parametrize("reason", REJECTIONS)
def test_combinations_outside_the_library_are_rejected_with_the_reason(library, reason):
    kind, change = REJECTIONS[reason]
    if "a_element" in change:
        change = {"b_element": change["a_element"], **change}
    x = torch.zeros(M, N, dtype=BF16) if kind == GELU_GRADIENT else None
    dtype = {GELU: None, GELU_GRADIENT: BF16, CODES: torch.float8_e4m3fn}[kind]
    request = h200_request(
        kind, operand(M, K, "cpu"), operand(N, K, "cpu"), Epilogue(BF16), True, x, dtype
    )
    request = dataclasses.replace(request, product=dataclasses.replace(request.product, **change))
    assert reason in (cublaslt_fused.unsupported_reason(request) or "")


def test_other_rejections_name_the_reason(library):
    a, b = operand(M, K, "cpu", formats.E4M3), operand(N, K, "cpu", formats.E4M3)
    codes = h200_request(CODES, a, b, Epilogue(BF16), second=True, x=None, dtype=torch.float8_e5m2)
    assert "an E5M2 result needs an E5M2 operand" in (
        cublaslt_fused.unsupported_reason(codes) or ""
    )
    x = torch.zeros(M, N, dtype=BF16)
    slow = h200_request(GELU_GRADIENT, a, b, Epilogue(BF16), False, x, BF16)
    assert "twice as long" in (cublaslt_fused.unsupported_reason(slow) or "")
    unquantized = operand(M, K, "cpu"), operand(N, K, "cpu")
    gradient = h200_request(GELU_GRADIENT, *unquantized, Epilogue(BF16), False, x, BF16)
    assert cublaslt_fused.unsupported_reason(gradient) is None
    columns = dataclasses.replace(gradient, x=MatrixLayout(False, M))
    assert "rows of the activation's input" in (cublaslt_fused.unsupported_reason(columns) or "")
    with use_backend(quantize="reference"):
        forced = h200_request(GELU, a, b, Epilogue(BF16), True)
    assert "use_backend(quantize='reference') is in force" in (
        cublaslt_fused.unsupported_reason(forced) or ""
    )
    library.algorithms = []
    planned = h200_request(GELU, a, b, Epilogue(BF16), False)
    assert cublaslt_fused.unsupported_reason(planned) is None
    assert "no algorithm" in cublaslt_fused.bind(planned).reason


def test_problems_with_different_epilogues_have_different_keys(library):
    a, b = operand(M, K, "cpu", formats.E4M3), operand(N, K, "cpu", formats.E4M3)
    x = torch.zeros(M, N, dtype=BF16)
    requests = [
        h200_request(GELU, a, b, Epilogue(BF16), False),
        h200_request(GELU, a, b, Epilogue(BF16), True),
        h200_request(GELU_GRADIENT, a, b, Epilogue(BF16), False, x, BF16),
        h200_request(CODES, a, b, Epilogue(BF16), second=False, x=None, dtype=torch.float8_e4m3fn),
        h200_request(CODES, a, b, Epilogue(BF16), second=True, x=None, dtype=torch.float8_e4m3fn),
    ]
    keys = {cublaslt_fused.fused_problem(request).key for request in requests}
    keys.add(cublaslt_fused.cublaslt.make_problem(requests[0].product).key)
    assert len(keys) == len(requests) + 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [GELU, GELU_GRADIENT])
def test_the_library_computes_bfloat16_products_with_gelu(kind):
    a, b = operand(256, 512, "cuda"), operand(384, 512, "cuda")
    x = torch.zeros(256, 384, device="cuda", dtype=BF16)
    bias = torch.zeros(384, device="cuda", dtype=BF16) if kind == GELU else None
    rest = (x, BF16) if kind == GELU_GRADIENT else (None, None)
    request = FusedRequest.of(kind, a, b, Epilogue(BF16, bias), kind == GELU, *rest)
    if reason := cublaslt_fused.cublaslt.unsupported_reason(request.product):
        pytest.skip(f"cublaslt: {reason}")
    assert cublaslt_fused.unsupported_reason(request) is None
    assert not isinstance(cublaslt_fused.bind(request), PlanFailure)


@pytest.mark.gpu
def test_a_captured_product_with_codes_records_at_every_replay():
    a, b = operand(256, 512, "cuda", formats.E4M3), operand(384, 512, "cuda", formats.E4M3)
    scale, record = torch.full((1,), 2.0, device="cuda"), torch.zeros(1, device="cuda")
    take("cublaslt", CODES, a, b, Epilogue(BF16), second=True, x=None, dtype=torch.float8_e4m3fn)
    gemm(a, b, Epilogue(BF16), make_cast(formats.E4M3, scale, record))
    largest = record.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        codes = gemm(a, b, Epilogue(BF16), make_cast(formats.E4M3, scale, record)).codes
    record.zero_()
    a.scale.mul_(3.0)
    graph.replay()
    torch.testing.assert_close(record, 3.0 * largest, rtol=1e-6, atol=0.0)
    exact = dequantize_operand(a) @ dequantize_operand(b).t() * 2.0
    expected = exact.clamp(-448.0, 448.0)
    assert (
        (codes.double() - expected).abs() <= 2.0**-3 * expected.abs() + 2.0**-7 + 2.0 * lost(a, b)
    ).all()


def test_equal_requests_compare_and_hash_equal(device):
    a, b = operand(M, K, device), operand(N, K, device)
    first, second = (
        FusedRequest.of(GELU, a, b, Epilogue(BF16), True, None, None) for _ in range(2)
    )
    assert first == second and hash(first) == hash(second)
    assert isinstance(first.product, GemmRequest)
