"""Products that the original computes: each is accepted, and compared with a product in float64."""

from __future__ import annotations

import warnings

import numpy
import pytest
import torch
from torch.nn.functional import gelu

import transformer_engine.pytorch as te
import transformer_engine.pytorch.cpp_extensions as cpp
import transformer_engine_torch as tex
from transformer_engine.common import warning

M, N, K = 32, 64, 128
E4M3 = te.DType.kFloat8E4M3
QUANTIZERS = {
    "plain": (lambda: None, lambda: None),
    "block": (
        lambda: te.Float8BlockQuantizer(E4M3, block_scaling_dim=1),
        lambda: te.Float8BlockQuantizer(E4M3, block_scaling_dim=2),
    ),
    "mxfp8": (lambda: te.MXFP8Quantizer(E4M3), lambda: te.MXFP8Quantizer(E4M3)),
}


@pytest.fixture(autouse=True)
def _warnings_start_anew(monkeypatch):
    monkeypatch.setattr(warning, "_issued", set())


def sample(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def operands(kind):
    """Return the operands x [M, K] and w [N, K], and their values in float64."""
    results = []
    for make, shape, seed in zip(QUANTIZERS[kind], ((M, K), (N, K)), (0, 1), strict=True):
        quantizer, x = make(), sample(*shape, seed=seed)
        operand = x if quantizer is None else quantizer(x)
        results += [operand, x.double() if quantizer is None else operand.dequantize().double()]
    return results


def generic(
    A,
    B,
    *,
    transA=True,
    transB=False,
    D=None,
    quantizer=None,
    dtype=None,
    bias=None,
    gelu=False,
    gelu_in=None,
    grad=False,
    accumulate=False,
    **rest,
):
    """Call `tex.generic_gemm` by keywords, with the split accumulator."""
    places = (
        A,
        transA,
        B,
        transB,
        D,
        quantizer,
        dtype,
        bias,
        None,
        gelu,
        gelu_in,
        grad,
        None,
        0,
        accumulate,
        True,
    )
    return tex.generic_gemm(*places, **rest)


def close(actual, expected):
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", QUANTIZERS)
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, None), (0.5, 2.0)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gelu_comes_after_accumulation_and_bias(kind, alpha, beta, with_bias):
    x, x_values, w, w_values = operands(kind)
    contents = sample(M, N, seed=2)
    bias = sample(N, seed=3) if with_bias else None
    before = alpha * x_values @ w_values.t() + (1.0 if beta is None else beta) * contents.double()
    before = before if bias is None else before + bias.double()
    out, _, gelu_input, _ = generic(
        w, x, D=contents, accumulate=True, gelu=True, alpha=alpha, beta=beta, bias=bias
    )
    assert out is contents
    close(gelu_input, before)
    close(out, gelu(before, approximate="tanh"))


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_the_derivative_of_gelu_multiplies_the_accumulated_gradient(kind):
    x, x_values, w, w_values = operands(kind)
    contents, gelu_in = sample(M, N, seed=2), sample(M, N, seed=4)
    leaf = gelu_in.double().requires_grad_()
    (expected,) = torch.autograd.grad(
        gelu(leaf, approximate="tanh"), leaf, x_values @ w_values.t() + contents.double()
    )
    out = generic(w, x, D=contents, accumulate=True, gelu=True, grad=True, gelu_in=gelu_in)[0]
    assert out is contents
    close(out, expected)


def test_a_quantizer_writes_a_quantized_result_in_place():
    x, x_values, _, _ = operands("mxfp8")
    quantizer = te.MXFP8Quantizer(E4M3, columnwise=False)
    contents = quantizer(sample(M, 64, seed=2))
    wide = te.MXFP8Quantizer(E4M3)(sample(64, K, seed=1))
    product = x_values @ wide.dequantize().double().t()
    old = contents.dequantize().double()
    result = generic(wide, x, D=contents, quantizer=quantizer)[0]
    assert result is contents
    assert torch.equal(contents._rowwise_data, quantizer(product.float())._rowwise_data)
    contents.quantize_(old.float())
    assert (
        generic(wide, x, D=contents, quantizer=quantizer, accumulate=True, beta=0.5)[0] is contents
    )
    assert torch.equal(
        contents._rowwise_data, quantizer((product + 0.5 * old).float())._rowwise_data
    )
    contents.quantize_(old.float())
    assert generic(wide, x, D=contents)[0] is contents  # by the output quantizer
    assert torch.equal(contents._rowwise_data, quantizer(product.float())._rowwise_data)


@pytest.mark.parametrize("number", [numpy.float32(0.5), torch.tensor(0.5), numpy.array(0.5)])
def test_alpha_and_beta_may_be_scalars_of_any_library(number):
    x, x_values, w, w_values = operands("plain")
    contents = sample(M, N, seed=2)
    expected = 0.5 * x_values @ w_values.t() + 0.5 * contents.double()
    close(
        cpp.general_gemm(w, x, out=contents, accumulate=True, alpha=number, beta=number)[0],
        expected,
    )


@pytest.mark.parametrize(
    "flag", [2, "yes", torch.tensor(True), numpy.bool_(True), numpy.array([1])]
)
def test_flags_may_be_anything_with_a_truth_value(flag):
    x, x_values, w, w_values = operands("plain")
    contents = sample(M, N, seed=2)
    expected = x_values @ w_values.t() + contents.double()
    close(cpp.general_gemm(w, x, out=contents, accumulate=flag)[0], expected)


def test_a_tensor_with_several_elements_is_rejected_as_a_flag():
    x, _, w, _ = operands("plain")
    with pytest.raises(
        TypeError, match=r"gelu=a Tensor of shape \[2\].* is neither True nor False; give a bool"
    ):
        cpp.general_gemm(w, x, gelu=torch.ones(2))


def test_an_empty_bias_means_no_bias():
    x, x_values, w, w_values = operands("plain")
    close(generic(w, x, bias=torch.empty(0))[0], x_values @ w_values.t())


@pytest.mark.parametrize(
    "options", [{"comm_type": "ag"}, {"extra_output": torch.empty(1)}, {"bulk_overlap": True}]
)
def test_arguments_of_an_absent_communicator_warn_once(options):
    x, x_values, w, w_values = operands("plain")
    with pytest.warns(UserWarning, match="have no effect without comm_overlap"):
        close(generic(w, x, **options)[0], x_values @ w_values.t())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generic(w, x, **options)


def test_grouped_results_stay_plain_whatever_quantizes_them():
    x, x_values, w, w_values = operands("plain")
    out = [torch.empty(M, N)]
    with pytest.warns(UserWarning, match="ignores quantization_params"):
        cpp.general_grouped_gemm([w], [x], out, [te.MXFP8Quantizer(E4M3)], m_splits=[M])
    close(out[0], x_values @ w_values.t())


@pytest.mark.parametrize(
    "m_splits",
    [numpy.array([8, 24]), torch.tensor([8, 24]), [8.0, 24.0], (numpy.int64(8), torch.tensor(24))],
)
def test_rows_of_groups_may_be_given_in_every_form(m_splits):
    x, x_values, w, w_values = operands("plain")
    out = torch.empty(M, N)
    _, _, before = cpp.general_grouped_gemm(
        [w, -w], x.split([8, 24]), [out], m_splits=m_splits, single_output=True, gelu=True
    )
    product = torch.cat((x_values[:8] @ w_values.t(), x_values[8:] @ -w_values.t()))
    close(torch.cat(before), product)
    close(out, gelu(product, approximate="tanh"))
