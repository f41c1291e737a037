"""The extension's general_gemm and related functions, against unquantized products."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import gelu

import transformer_engine.pytorch as te
import transformer_engine.pytorch.cpp_extensions as cpp
import transformer_engine_torch as tex
from transformer_engine.pytorch.cpp_extensions.gemm import get_cublas_workspace_size_bytes

M, N, K = 32, 48, 64


@pytest.fixture
def dtype(device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def sample(device, *shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def layer(device, dtype):
    """x [M, K], w [N, K], dy [M, N]"""
    return [
        sample(device, *shape, dtype=dtype, seed=i)
        for i, shape in enumerate(((M, K), (N, K), (M, N)))
    ]


def close(actual, expected):
    tolerance = 2e-2 if actual.dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance * 8)


def close_to_codes(actual, expected, left, right, transposed):
    """Tolerance relative to sum(|a| |b|): a GPU keeps about 14 bits in a partial sum of FP8 products."""
    left, right = (
        x.abs().t() if is_transposed else x.abs()
        for x, is_transposed in zip((left, right), transposed, strict=True)
    )
    bound = (2.0**-12 if actual.is_cuda else 2.0**-20) * (left @ right)
    assert bool(((actual.double() - expected).abs() <= bound).all())


def test_the_three_layouts_are_the_three_products_of_a_layer(device, dtype):
    x, w, dy = layer(device, dtype)
    close(cpp.general_gemm(w, x)[0], x.float() @ w.float().t())
    close(cpp.general_gemm(w, dy, layout="NN")[0], dy.float() @ w.float())
    close(cpp.general_gemm(x, dy, layout="NT")[0], dy.float().t() @ x.float())
    with pytest.raises(ValueError, match="layout='TT' does not exist"):
        cpp.general_gemm(w, x, layout="TT")


def test_results_keep_leading_axes(device, dtype):
    x, w, _ = layer(device, dtype)
    out = cpp.general_gemm(w, x.view(4, 8, K))[0]
    assert out.shape == (4, 8, N)
    close(out.view(M, N), x.float() @ w.float().t())


def test_quantized_products_equal_products_of_dequantized_values(device, dtype):
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs FP8 products")
    x, w, dy = layer(device, dtype)
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device)
    qx, qw, qdy = (quantizer(t) for t in (x, w, dy))
    x, w, dy = (q.dequantize().float() for q in (qx, qw, qdy))
    results = [
        cpp.general_gemm(qw, qx, out_dtype=dtype, use_split_accumulator=True)[0],
        cpp.general_gemm(qw, qdy, out_dtype=dtype, layout="NN", use_split_accumulator=True)[0],
        cpp.general_gemm(qx, qdy, out_dtype=dtype, layout="NT", use_split_accumulator=True)[0],
    ]
    for product, expected in zip(results, (x @ w.t(), dy @ w, dy.t() @ x), strict=True):
        close(product, expected)


def test_a_quantizer_makes_the_result(device, dtype):
    x, w, _ = layer(device, dtype)
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device, columnwise=False)
    result = cpp.general_gemm(w, x, quantization_params=quantizer)[0]
    assert isinstance(result, te.Float8Tensor)
    assert torch.equal(result._data, quantizer(cpp.general_gemm(w, x)[0])._data)


def test_bias_is_added_forward_and_summed_up_backward(device, dtype):
    x, w, dy = layer(device, dtype)
    bias = sample(device, N, dtype=dtype, seed=5)
    close(cpp.general_gemm(w, x, bias=bias)[0], x.float() @ w.float().t() + bias.float())
    _, grad_bias, _, _ = cpp.general_gemm(x, dy, layout="NT", bias=bias, grad=True)
    assert grad_bias.dtype == dtype
    close(grad_bias, dy.float().sum(0))


def test_gelu_and_its_derivative(device, dtype):
    x, w, _ = layer(device, dtype)
    bias = sample(device, N, dtype=dtype, seed=5)
    out, _, before, _ = cpp.general_gemm(w, x, bias=bias, gelu=True)
    exact = (x.float() @ w.float().t() + bias.float()).requires_grad_()
    close(before, exact.detach())
    close(out, gelu(exact, approximate="tanh").detach())
    # for a second layer, whose input is a gelu result
    weight = sample(device, K, N, dtype=dtype, seed=6)
    grad = sample(device, M, K, dtype=dtype, seed=7)
    (expected,) = torch.autograd.grad(
        gelu(exact, approximate="tanh"), exact, grad.float() @ weight.float()
    )
    close(
        cpp.general_gemm(weight, grad, layout="NN", gelu=True, gelu_in=before, grad=True)[0],
        expected,
    )
    with pytest.raises(ValueError, match="needs gelu_in"):
        cpp.general_gemm(weight, grad, layout="NN", gelu=True, grad=True)


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, None), (0.5, None), (1.0, 0.25), (2.0, 0.5)])
def test_results_accumulate_into_the_output(alpha, beta, device, dtype):
    x, _, dy = layer(device, dtype)
    contents = sample(device, N, K, seed=8)
    expected = alpha * (dy.float().t() @ x.float()) + (1.0 if beta is None else beta) * contents
    result = cpp.general_gemm(
        x, dy, layout="NT", out=contents, accumulate=True, alpha=alpha, beta=beta
    )[0]
    assert result is contents
    torch.testing.assert_close(contents, expected, rtol=2e-2, atol=0.2)


def test_a_beta_of_zero_ignores_the_old_output(device, dtype):
    x, w, _ = layer(device, dtype)
    contents = torch.full((M, N), torch.nan, device=device, dtype=dtype)
    result = cpp.general_gemm(w, x, out=contents, accumulate=True, beta=0.0)[0]
    assert result is contents
    close(contents, x.float() @ w.float().t())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"accumulate": True, "out": None}, "accumulate=True without D"),
        ({"accumulate": True, "beta": 2.0, "bias": torch.zeros(7)}, "the bias has shape"),
    ],
)
def test_a_rejected_accumulation_changes_nothing(options, match, device, dtype):
    x, w, _ = layer(device, dtype)
    contents = torch.ones(M, N, device=device, dtype=dtype)
    with pytest.raises(ValueError, match=match):
        cpp.general_gemm(w, x, **{"out": contents, **options})
    with pytest.raises(ValueError, match="the product is"):
        cpp.general_gemm(w, x, out=contents[:, 1:], accumulate=True, beta=2.0)
    assert torch.equal(contents, torch.ones_like(contents))


def test_matrices_with_two_dtypes_are_multiplied_in_the_wider_one(device):
    x, w = (
        sample(device, M, K, dtype=torch.float32),
        sample(device, N, K, dtype=torch.bfloat16, seed=1),
    )
    out = cpp.general_gemm(w, x, out_dtype=torch.float32)[0]
    torch.testing.assert_close(out, x @ w.float().t(), rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"ub": object()}, TypeError, "has no buffer"),
        ({"ub_type": "ag"}, ValueError, "ub_type='ag' without ub"),
        ({"beta": 2.0}, ValueError, "beta=2.0 without accumulate"),
    ],
)
def test_unsupported_options_are_rejected(options, error, match, device, dtype):
    x, w, _ = layer(device, dtype)
    with pytest.raises(error, match=match):
        cpp.general_gemm(w, x, **options)


def test_the_extensions_argument_list(device, dtype):
    x, w, _ = layer(device, dtype)
    number = te.DType.kBFloat16 if dtype == torch.bfloat16 else te.DType.kFloat32
    done = tex.generic_gemm(
        w, True, x, False, None, None, number, None, None, False, None, False, None, 0, False, False
    )
    assert len(done) == 4 and done[1:] == [None, None, None]
    assert torch.equal(done[0], cpp.general_gemm(w, x)[0])
    assert get_cublas_workspace_size_bytes() >= 1 << 22


def generic(
    A,
    transA,
    B,
    transB,
    *,
    D=None,
    dtype=None,
    bias=None,
    gelu=False,
    gelu_in=None,
    grad=False,
    **rest,
):
    """Call `tex.generic_gemm` by keywords, with the split accumulator by default."""
    accumulate, split = rest.pop("accumulate", False), rest.pop("split", True)
    options = (bias, None, gelu, gelu_in, grad, None, 0, accumulate, split)
    return tex.generic_gemm(
        A, transA, B, transB, D, rest.pop("quantizer", None), dtype, *options, **rest
    )


def blocks(dimensions, element="kFloat8E4M3", **usage):
    return te.Float8BlockQuantizer(te.DType[element], block_scaling_dim=dimensions, **usage)


def needs_blocks(device):
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs FP8")


def test_both_operands_may_be_transposed(device, dtype):
    a, b = sample(device, N, M, dtype=dtype), sample(device, M, K, dtype=dtype, seed=1)
    expected = b.double().t() @ a.double().t()
    actual = generic(a, True, b, True)[0]
    assert actual.shape == (K, N)
    close(actual, expected)
    contents = sample(device, K, N, dtype=dtype, seed=2)
    before = contents.double()
    assert generic(a, True, b, True, D=contents, accumulate=True)[0] is contents
    close(contents, before + expected)
    close(generic(a, True, b.view(4, M // 4, K), True)[0], expected)


@pytest.mark.parametrize(("a_blocks", "b_blocks"), [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize(
    ("trans_a", "trans_b"), [(True, False), (False, False), (False, True), (True, True)]
)
def test_blocks_are_read_along_the_axis_that_is_contracted(
    a_blocks, b_blocks, trans_a, trans_b, device
):
    needs_blocks(device)
    m, n, k = 128, 256, 384
    a = sample(device, *((n, k) if trans_a else (k, n)), dtype=torch.bfloat16)
    b = sample(device, *((k, m) if trans_b else (m, k)), dtype=torch.bfloat16, seed=1)
    qa = blocks(a_blocks, rowwise=trans_a, columnwise=not trans_a)(a)
    qb = blocks(b_blocks, rowwise=not trans_b, columnwise=trans_b)(b)
    left, right = (q.dequantize().double() for q in (qb, qa))
    expected = (left.t() if trans_b else left) @ (right.t() if trans_a else right)
    close_to_codes(
        generic(qa, trans_a, qb, trans_b, dtype=torch.float32)[0],
        expected,
        left,
        right,
        (trans_b, trans_a),
    )


@pytest.mark.parametrize(
    "elements", [("kFloat8E4M3", "kFloat8E5M2"), ("kFloat8E5M2", "kFloat8E4M3")]
)
@pytest.mark.parametrize(("a_blocks", "b_blocks"), [(1, 1), (1, 2), (2, 1)])
def test_blocks_of_two_elements_are_multiplied(elements, a_blocks, b_blocks, device):
    needs_blocks(device)
    a, b = (
        sample(device, 128, 256, dtype=torch.bfloat16),
        sample(device, 48, 256, dtype=torch.bfloat16, seed=1),
    )
    b = b if b_blocks == 1 else sample(device, 128, 256, dtype=torch.bfloat16, seed=1)
    qa, qb = blocks(a_blocks, elements[0])(a), blocks(b_blocks, elements[1])(b)
    left, right = (q.dequantize().double() for q in (qb, qa))
    result = generic(qa, True, qb, False, dtype=torch.float32)[0]
    close_to_codes(result, left @ right.t(), left, right, (False, True))


@pytest.mark.parametrize("quantized", [False, True])
def test_a_bias_may_be_a_row(quantized, device, dtype):
    needs_blocks(device)
    x, w, dy = layer(device, dtype)
    bias = sample(device, 1, N, dtype=dtype, seed=5)
    if quantized:
        x, w = blocks(1)(x), blocks(2)(w)
    options = {"dtype": dtype, "bias": bias}
    assert torch.equal(
        generic(w, True, x, False, **options)[0],
        generic(w, True, x, False, **options | {"bias": bias[0]})[0],
    )
    full = [generic(w, True, x, False, dtype=dtype, gelu=True, bias=b)[0] for b in (bias, bias[0])]
    assert torch.equal(full[0], full[1])
    if not quantized:
        close(generic(x, False, dy, True, bias=bias, grad=True)[1], dy.float().sum(0))
    with pytest.raises(ValueError, match="the bias has shape"):
        generic(w, True, x, False, dtype=dtype, bias=bias.t())


@pytest.mark.parametrize(
    ("w_blocks", "rows", "options", "match"),
    [
        (2, M, {"split": False}, "use_split_accumulator=False"),
        ("x", M, {}, "both have 128 x 128 blocks"),
        (2, M, {"grad": True, "bias": torch.ones(N)}, "grad=True with a bias"),
        (2, M - 1, {}, f"M={M - 1}, N={N}, K={K} are not all multiples of 16"),
    ],
)
def test_unsupported_products_of_blocks_are_rejected(w_blocks, rows, options, match, device):
    x, w, _ = layer(device, torch.bfloat16)
    both = w_blocks == "x"
    qx, qw = blocks(2 if both else 1)(x[:rows]), blocks(2)(w)
    contents = torch.ones(rows, N, device=device)
    with pytest.raises(RuntimeError, match=match):
        generic(qw, True, qx, False, D=contents, **options)
    assert torch.equal(contents, torch.ones_like(contents))
    for extents in ((K - 8, N), (K, N - 8)):
        narrow_x, narrow_w = (
            blocks(1)(x[:, : extents[0]].contiguous()),
            blocks(1)(w[: extents[1], : extents[0]]),
        )
        with pytest.raises(RuntimeError, match="multiples of 16"):
            generic(narrow_w, True, narrow_x, False, dtype=torch.float32)


def test_products_of_blocks_by_layout_promote_their_sums(device):
    needs_blocks(device)
    x, w, _ = layer(device, torch.bfloat16)
    qx, qw = blocks(1)(x), blocks(2)(w)
    result = cpp.general_gemm(qw, qx, out_dtype=torch.float32)[0]
    assert torch.equal(result, generic(qw, True, qx, False, dtype=torch.float32)[0])
    out = [torch.empty(M, N, device=device)]
    cpp.general_grouped_gemm([qw], [qx], out, m_splits=[M])
    assert torch.equal(out[0], result)


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("options", [{}, {"use_bias": True}, {"use_bias": True, "gelu": True}])
def test_grouped_products_equal_single_products(options, single, device, dtype):
    splits = [16, 0, 32]
    x = sample(device, sum(splits), K, dtype=dtype).split(splits)
    weights = [sample(device, N, K, dtype=dtype, seed=i) for i in range(3)]
    biases = [sample(device, N, dtype=dtype, seed=9 + i) for i in range(3)]
    full = torch.empty(sum(splits), N, device=device, dtype=dtype)
    out = [full] if single else list(full.split(splits))
    _, _, before = cpp.general_grouped_gemm(
        weights, x, out, m_splits=splits, bias=biases, single_output=single, **options
    )
    gelu_asked = options.get("gelu", False)
    for i, part in enumerate(full.split(splits)):
        bias = biases[i] if options else None
        alone = cpp.general_gemm(weights[i], x[i], bias=bias, gelu=gelu_asked)
        assert torch.equal(part, alone[0])
        assert not gelu_asked or torch.equal(before[i], alone[2])


def test_grouped_weight_gradients_accumulate_and_sum_the_biases(device, dtype):
    splits = [16, 32]
    x = sample(device, sum(splits), K, dtype=dtype).split(splits)
    dy = sample(device, sum(splits), N, dtype=dtype, seed=1).split(splits)
    contents = [torch.ones(N, K, device=device) for _ in splits]
    _, gradients, _ = cpp.general_grouped_gemm(
        x, dy, contents, layout="NT", m_splits=splits, grad=True, accumulate=True, use_bias=True
    )
    for i, result in enumerate(contents):
        torch.testing.assert_close(
            result, 1 + dy[i].float().t() @ x[i].float(), rtol=2e-2, atol=0.2
        )
        torch.testing.assert_close(gradients[i].float(), dy[i].float().sum(0), rtol=2e-2, atol=0.2)
    with pytest.raises(ValueError, match="2 A, 1 B and 2 results"):
        cpp.general_grouped_gemm(x, dy[:1], contents, layout="NT")
