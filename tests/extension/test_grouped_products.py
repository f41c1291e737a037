"""Products, activations and casts on GroupedTensors against separate matrices."""

from __future__ import annotations

import pytest
import torch

import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from tests.tensor.quantizer_cases import create_quantizer, same_payload
from transformer_engine.pytorch.cpp_extensions import (
    general_gemm,
    general_grouped_gemm_for_grouped_tensor,
)

ROWS = [32, 0, 64]


def create_group(matrices: list[torch.Tensor]) -> te.GroupedTensor:
    return te.GroupedTensor.of_members(matrices)


@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
@pytest.mark.parametrize("kind", ["groups", "list of A", "list of results"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_grouped_products_equal_per_matrix_products(layout, kind, accumulate, device):
    n, k = 48, 32
    torch.manual_seed(2)
    shapes = {
        "TN": [((n, k), (m, k), (m, n)) for m in ROWS],
        "NN": [((n, k), (m, n), (m, k)) for m in ROWS],
        "NT": [((m, k), (m, n), (n, k)) for m in ROWS],
    }[layout]
    a, b, out = ([torch.randn(*each[i], device=device) for each in shapes] for i in range(3))
    expected = []
    for left, right, result in zip(a, b, out, strict=True):
        product = (
            right.t() @ left if layout == "NT" else right @ (left.t() if layout == "TN" else left)
        )
        expected.append(product + result * accumulate)
    A = a if kind == "list of A" else create_group(a)
    results = out if kind == "list of results" else create_group(out)
    output = general_grouped_gemm_for_grouped_tensor(
        A, create_group(b), results, layout=layout, accumulate=accumulate
    )
    assert output is results
    actual = output if kind == "list of results" else output.members()
    for got, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, reference, rtol=1e-4, atol=1e-4)


def test_factors_and_scaled_biases_per_matrix(device):
    w = [torch.randn(16, 32, device=device) for _ in range(2)]
    x, y = (
        [torch.randn(m, 32, device=device) for m in (8, 24)],
        [torch.zeros(m, 16, device=device) for m in (8, 24)],
    )
    biases, scales = (
        [torch.randn(16, device=device) for _ in range(2)],
        torch.rand(32, device=device),
    )
    alpha = torch.tensor([2.0, 0.5], device=device)
    out = general_grouped_gemm_for_grouped_tensor(
        create_group(w),
        create_group(x),
        create_group(y),
        bias=te.GroupedTensor.of_members(biases),
        bias_scale=scales,
        alpha=alpha,
    )
    parts = scales.split([8, 24])
    for i, got in enumerate(out.members()):
        expected = alpha[i] * (x[i] @ w[i].t()) + parts[i][:, None] * biases[i]
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_quantized_groups_are_multiplied_by_their_codes(device):
    x, w = torch.randn(96, 64, device=device), torch.randn(96, 64, device=device)
    cast = create_quantizer("mxfp8", device)
    first_dims = torch.tensor([32, 64], device=device)
    qx, qw = tex.group_quantize(x, cast, 2, first_dims), tex.group_quantize(w, cast, 2, first_dims)
    out = create_group([torch.zeros(32, 32, device=device), torch.zeros(64, 64, device=device)])
    general_grouped_gemm_for_grouped_tensor(qw, qx, out)
    operands = (group.split_into_quantized_tensors() for group in (qw, qx))
    for got, a, b in zip(out.members(), *operands, strict=True):
        torch.testing.assert_close(got, general_gemm(a, b, torch.float32)[0])


def test_unsupported_products_are_rejected(device):
    a, b = [torch.ones(4, 4, device=device)], create_group([torch.ones(4, 4, device=device)])
    for options, error, words in (
        ({"grad": True}, NotImplementedError, "grad=True"),
        ({"bias_scale": torch.ones(4)}, ValueError, "bias_scale without bias"),
    ):
        with pytest.raises(error, match=words):
            general_grouped_gemm_for_grouped_tensor(b, b, b, **options)
    with pytest.raises(ValueError, match="A and out are both lists"):
        general_grouped_gemm_for_grouped_tensor(a, b, a)
    with pytest.raises(ValueError, match="bias with a list of results"):
        general_grouped_gemm_for_grouped_tensor(b, b, a, bias=b)
    scaled = te.NVFP4Quantizer(row_scaled_nvfp4=True, columnwise=False)(
        torch.randn(16, 16, device=device)
    )
    with pytest.raises(NotImplementedError, match="scale per row"):
        general_grouped_gemm_for_grouped_tensor([scaled], b, b)


def test_columns_are_added_from_decoded_rows(device):
    x, first_dims = torch.randn(96, 64, device=device), torch.tensor([32, 64], device=device)
    rows = create_quantizer("mxfp8", device, columnwise=False)
    group = tex.group_quantize(x, rows, 2, first_dims)
    values = group.dequantize()
    decoded = tex.group_requantize_inplace(
        group, rows, 2, first_dims, tex.DType.kBFloat16, return_dequantized=True
    )
    assert (
        torch.equal(decoded, values.bfloat16())
        and group.first_dims is first_dims
        and group.has_columnwise_data()
    )
    columns = create_quantizer("mxfp8", device, rowwise=False)
    for member, part in zip(
        group.split_into_quantized_tensors(), decoded.split([32, 64]), strict=True
    ):
        assert torch.equal(member._columnwise_data, columns(part)._columnwise_data)
        assert torch.equal(member._columnwise_scale_inv, columns(part)._columnwise_scale_inv)


@pytest.mark.parametrize("clamped", [False, True])
def test_recomputed_activations_are_quantized_by_group(clamped, device):
    x, prob = torch.randn(96, 128, device=device), torch.rand(96, device=device)
    first_dims, cast = torch.tensor([32, 64], device=device), create_quantizer("mxfp8", device)
    if clamped:
        group = tex.group_scaled_clamped_swiglu(x, prob, cast, 2, 7.0, first_dims=first_dims)
        values = tex.scaled_clamped_swiglu(x, prob, None, 7.0, 1.702, 1.0)
    else:
        group = tex.group_scaled_swiglu(x, prob, cast, 2, first_dims)
        values = tex.scaled_swiglu(x, prob, None)
    assert not group.has_data()
    columns = create_quantizer("mxfp8", device, rowwise=False)
    for member, part in zip(
        group.split_into_quantized_tensors(), values.split([32, 64]), strict=True
    ):
        assert same_payload(member, columns(part))


def test_given_maxima_and_preparations_of_attention(device):
    x = torch.randn(32, 64, device=device)
    cast = te.NVFP4Quantizer()
    local = cast(x)
    argument = tex.nvfp4_quantize_with_amax(x, cast, local._amax_rowwise, local._amax_columnwise)
    assert same_payload(local, argument)
    larger = tex.nvfp4_quantize_with_amax(x, cast, 2 * local._amax_rowwise, None)
    assert torch.equal(larger._amax_rowwise, 2 * local._amax_rowwise)
    q = torch.randn(5, 2, 3, 6, device=device)  # sbhd
    (transposed,) = tex.multi_tensor_transpose_to_bhsd([q], tex.NVTE_QKV_Format.NVTE_SBHD)
    assert torch.equal(transposed, q.permute(1, 2, 0, 3)) and transposed.is_contiguous()
    (padded,) = tex.multi_tensor_pad_last_dim([q], 8)
    assert (
        padded.shape == (5, 2, 3, 8)
        and torch.equal(padded[..., :6], q)
        and not padded[..., 6:].any()
    )
