"""The functions under pytorch.triton equal plain PyTorch and autograd."""

from __future__ import annotations

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch.triton import (
    cross_entropy,
    grouped_dbias_dscales,
    mhc,
    pad,
    permutation,
)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a.double(), b.double(), rtol=2e-5, atol=2e-5)


def test_permutation_by_a_mask_and_back():
    mask = torch.tensor([[0, 1, 1], [1, 0, 0], [1, 0, 1], [0, 1, 0]])
    x, probs = torch.randn(4, 6), torch.rand(4, 3)
    scale = torch.rand(4, 2)
    row_map = permutation.make_row_id_map(mask, 4, 3)
    assert row_map[:, 6].tolist() == [2, 1, 2, 1] and row_map[0, :2].tolist() == [4, 2]
    rows, row_scales, row_probs = permutation.permute_with_mask_map(
        x, row_map, probs, scale, None, 4, 3, 6, 6, 2
    )
    tokens, experts = mask.t().nonzero()[:, 1], mask.t().nonzero()[:, 0]
    assert torch.equal(rows, x[tokens]) and torch.equal(row_scales, scale[tokens])
    assert torch.equal(row_probs, probs[tokens, experts])
    summed, back = permutation.unpermute_with_mask_map(
        rows, row_map, probs, row_probs, None, 4, 3, 6
    )
    close(summed, x * (probs * mask).sum(1, keepdim=True))
    assert torch.equal(back, probs * mask)
    dy = torch.randn(4, 6)
    grad_rows, grad_probs = permutation.unpermute_with_mask_map_bwd_with_merging_probs(
        dy, row_map, rows, probs, None, 4, 3, 6, 6
    )
    close(grad_rows, dy[tokens] * probs[tokens, experts][:, None])
    close(grad_probs, (x @ dy.t()).diagonal()[:, None] * mask)


def test_chunks_are_sorted_and_sorted_back():
    x, probs = torch.randn(6, 3), torch.rand(6)
    row_map = permutation.make_chunk_sort_map(
        torch.tensor([2, 1, 3]), torch.tensor([2, 0, 1]), 6, 3
    )
    assert row_map.tolist() == [3, 4, 5, 0, 1, 2]
    rows, row_probs = permutation.sort_chunks_by_map(x, row_map, probs, 6, 3, True)
    assert torch.equal(rows, torch.cat((x[3:], x[:2], x[2:3]))) and torch.equal(
        row_probs, probs[[3, 4, 5, 0, 1, 2]]
    )
    assert torch.equal(permutation.sort_chunks_by_map(rows, row_map, None, 6, 3, False)[0], x)


@pytest.mark.parametrize("reduce", [False, True])
def test_cross_entropy_returns_loss_and_gradient(reduce):
    x, target = torch.randn(2, 3, 7), torch.tensor([[1, -100, 6], [0, 2, 2]])
    wide = x.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(
        wide.view(-1, 7),
        target.view(-1),
        reduction="mean" if reduce else "none",
        label_smoothing=0.1,
    )
    (gradient,) = torch.autograd.grad(expected.sum(), wide)
    before = x.clone()
    loss, result = cross_entropy.cross_entropy_forward(x, target, 0.1, reduce, None, -100)
    close(loss.view(-1), expected.detach().view(-1))
    close(result, gradient)
    assert result.dtype == torch.float32 and torch.equal(x, before)
    factor = torch.tensor(2.0) if reduce else torch.rand(2, 3)
    scaled = cross_entropy.cross_entropy_backward(result.clone(), factor)
    close(scaled, result * (factor if reduce else factor[..., None]))


def test_grouped_gradients_ignore_rows_outside_of_groups():
    dy, scales, bias = torch.randn(9, 4), torch.rand(9), torch.randn(3, 4)
    dy[8] = torch.nan
    offsets = torch.tensor([1, 4, 4, 8])
    spans = [(1, 4), (4, 4), (4, 8)]
    close(
        grouped_dbias_dscales.compute_grouped_dbias(dy, offsets, 3),
        torch.stack([dy[a:b].sum(0) for a, b in spans]),
    )
    start = torch.ones(3, 4)
    dbias, dscales = grouped_dbias_dscales.compute_grouped_dbias_dscales(
        dy, scales, bias, offsets, start
    )
    assert dbias is start
    close(dbias, 1 + torch.stack([(dy[a:b] * scales[a:b, None]).sum(0) for a, b in spans]))
    expected = torch.zeros(9)
    for (a, b), local in zip(spans, bias, strict=True):
        expected[a:b] = dy[a:b] @ local
    close(dscales, expected)
    with pytest.raises(AssertionError, match="float32"):
        grouped_dbias_dscales.compute_grouped_dbias(dy, offsets, 3, torch.zeros(3, 4).half())


def test_column_scales_are_padded_to_tiles():
    scales = torch.arange(1, 11, dtype=torch.uint8).view(2, 5)
    padded = pad.pad_columnwise_scale_inv(scales)
    assert padded.shape == (4, 128) and torch.equal(padded[:2, :5], scales)
    assert int(padded.sum()) == int(scales.sum())
    with pytest.raises(ValueError, match="uint8"):
        pad.pad_columnwise_scale_inv(scales.float())


def mix_streams(x, phi, alpha, beta, weight):
    """Hyper-connections in float64: layer input, H_post, H_res."""
    s, b, c, n = x.shape
    flat = x.reshape(s * b, c * n)
    z = flat @ (phi * weight).T / flat.square().mean(-1, keepdim=True).sqrt()
    z = z * torch.cat((alpha[:1].expand(n), alpha[1:2].expand(n), alpha[2:].expand(n * n))) + beta
    before, after, residual = z.split((n, n, n * n), dim=1)
    matrix = residual.view(s, b, n, n).exp()
    for _ in range(20):
        matrix = matrix / matrix.sum(-1, keepdim=True)
        matrix = matrix / matrix.sum(-2, keepdim=True)
    aggregated = torch.einsum("sbcn,sbn->sbc", x, torch.sigmoid(before).view(s, b, n))
    return aggregated, 2 * torch.sigmoid(after).view(s, b, n), matrix


@pytest.mark.parametrize("n", [4, 2])
def test_hyper_connections_equal_float64_forward_and_backward(n):
    s, b, c = 3, 2, 6
    shapes = [(s, b, c, n), (n * (n + 2), c * n), (3,), (1, n * (n + 2)), (c * n,), (s, b, c), (c,)]
    values = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    singles = [value.detach().float().requires_grad_() for value in values]

    def run(x, phi, alpha, beta, weight, f, bias, functions):
        mix, combine = functions
        layer_input, after, residual = mix(x, phi, alpha, beta, weight)
        return layer_input, combine(f, bias, after, x, residual)

    expected = run(
        *values,
        (
            mix_streams,
            lambda f, bias, p, x, r: (f + bias)[..., None] * p[..., None, :] + x @ r,
        ),
    )
    result = run(
        *singles,
        (
            mhc.mhc_generate_mix_and_aggregate,
            lambda f, bias, p, x, r: mhc.mhc_fused_expand_combine(f, bias, p, x, r, n),
        ),
    )
    for got, reference in zip(result, expected, strict=True):
        close(got, reference)
    sum(out.sum() for out in expected).backward()
    sum(out.sum() for out in result).backward()
    for got, reference in zip(singles, values, strict=True):
        torch.testing.assert_close(got.grad.double(), reference.grad, rtol=1e-3, atol=1e-4)


def test_hyper_connection_matrices_are_doubly_stochastic():
    for recompute in (True, False):
        logits = torch.randn(2, 3, 4, 4, requires_grad=True)
        matrix = mhc.mhc_fused_sinkhorn(logits, recompute_hist=recompute)
        close(matrix.sum(-1), torch.ones(2, 3, 4))
        close(matrix.sum(-2), torch.ones(2, 3, 4))
        matrix.square().sum().backward()
        assert logits.grad is not None and logits.grad.isfinite().all()


def test_the_projection_is_padded_and_split_k_needs_permission(monkeypatch):
    x, phi = torch.randn(5, 8), torch.randn(24, 8)
    H, ms = mhc.mhc_fused_projection(x, phi, use_split_k=True)
    assert H.shape == (5, 32) and int(H[:, 24:].count_nonzero()) == 0
    close(H[:, :24], x @ phi.T)
    close(ms, x.square().mean(1))
    assert mhc.ENFORCE_DETERMINISTIC is False
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    assert mhc.ENFORCE_DETERMINISTIC is True
    with pytest.raises(RuntimeError, match="use_split_k"):
        mhc.mhc_fused_projection(x, phi, use_split_k=True)


def test_wrappers_are_attributes_of_the_package():
    assert te.triton.mhc is mhc and te.triton.pad is pad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mhc_scale_keeps_the_dtype_of_the_projection(dtype):
    H, ms = torch.randn(16, 32, dtype=dtype), torch.rand(16, dtype=dtype) + 1
    alpha, beta = torch.randn(3, dtype=dtype), torch.randn(1, 24, dtype=dtype)
    parts = mhc.mhc_fused_scale(H, alpha, beta, ms, 4)
    z = (
        H[:, 20:24].double() / ms.double().sqrt()[:, None] * alpha[2].double()
        + beta[0, 20:].double()
    )
    assert [part.dtype for part in parts] == [dtype] * 3
    torch.testing.assert_close(parts[2][:, 12:], z.to(dtype))
