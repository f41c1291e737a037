"""Router and loss calls that the original computes, compared with plain PyTorch."""

from __future__ import annotations

import warnings

import numpy
import pytest
import torch

import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common import warning
from transformer_engine.pytorch.router import (
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)

T, E, K = 6, 8, 2
SCALARS = {"float": float, "numpy": numpy.float32, "tensor": torch.tensor}


@pytest.fixture(autouse=True)
def _warnings_start_anew(monkeypatch):
    monkeypatch.setattr(warning, "_issued", set())


def sample(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sigmoid_choice(logits, bias, k, scale):
    """Dense weights and map for the top-k experts by sigmoid scores."""
    scores = torch.sigmoid(logits.float())
    chosen = (scores + bias).topk(k, dim=-1).indices
    routed = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True)
    weights = torch.where(routed, scores, 0.0)
    return scale * weights / weights.sum(-1, keepdim=True), routed


@pytest.mark.parametrize("scalar", SCALARS)
@pytest.mark.parametrize("shape", [(E,), (T, E), (2, 3, E)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_top_k_accepts_all_number_types_and_bias_dtypes(scalar, shape, dtype):
    form = SCALARS[scalar]
    logits, bias = sample(*shape).requires_grad_(), sample(E, seed=1).to(dtype)
    expected, routed = sigmoid_choice(logits, bias.float(), K, 2.5)
    probs, actual = fused_topk_with_score_function(
        logits, form(K), numpy.bool_(False), form(-3), form(0), form(2.5), "sigmoid", bias
    )
    torch.testing.assert_close(probs, expected)
    assert torch.equal(actual, routed)
    dprobs = sample(*shape, seed=2)
    ours, reference = (torch.autograd.grad(y, logits, dprobs)[0] for y in (probs, expected))
    torch.testing.assert_close(ours, reference, atol=1e-6, rtol=1e-5)
    raw = tex.fused_topk_with_score_function_fwd(
        logits.detach(), form(K), False, None, None, form(2.5), "sigmoid", bias
    )
    assert torch.equal(raw[0], probs) and torch.equal(raw[1], actual)
    grad = torch.empty_like(logits)
    tex.fused_topk_with_score_function_bwd(
        raw[1], raw[2], dprobs, grad, form(K), False, form(2.5), "sigmoid"
    )
    torch.testing.assert_close(grad, reference, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("k", [2.0, numpy.int64(2), torch.tensor([2])])
def test_one_tokens_scores_sum_to_one(k):
    logits = sample(E)
    routed, scores = fused_compute_score_for_moe_aux_loss(logits, k, "softmax")
    torch.testing.assert_close(scores, logits.softmax(-1))
    assert torch.equal(routed.nonzero()[:, 0], logits.topk(2).indices.sort().values)


@pytest.mark.parametrize(
    "total", [float(T), numpy.int32(T), torch.tensor(T), torch.tensor([float(T)])]
)
@pytest.mark.parametrize("shape", [(E,), (1, E), (2, E // 2)])
def test_the_auxiliary_loss_accepts_all_count_types(total, shape):
    probs = torch.rand(T, E, generator=torch.Generator().manual_seed(0)).requires_grad_()
    tokens = torch.arange(float(E)).view(shape)
    expected = (tokens.view(-1) * probs.sum(0)).sum() * E * 0.01 / (K * T**2)
    actual = fused_moe_aux_loss(probs, tokens, total, numpy.int64(E), float(K), torch.tensor(0.01))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y, probs)[0] for y in (actual, expected)))
    raw, constant = tex.fused_moe_aux_loss_fwd(
        probs.detach(), tokens, total, E, T, E, numpy.int64(K), 0.01
    )
    torch.testing.assert_close(raw, expected.detach())
    grad = tex.fused_moe_aux_loss_bwd(
        constant, tokens, torch.tensor(T), float(E), torch.tensor(1.0)
    )
    torch.testing.assert_close(grad, tokens.view(-1).expand(T, E) * E * 0.01 / (K * T**2))


def torch_loss(logits, target, smoothing=0.0, reduction="none", ignored=-100):
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1),
        target.reshape(-1).long(),
        ignore_index=ignored,
        label_smoothing=smoothing,
        reduction=reduction,
    )


@pytest.mark.parametrize("form", [numpy.float32, torch.tensor, numpy.array])
@pytest.mark.parametrize("reduce_loss", [1, 2, numpy.bool_(True), torch.tensor(True), "mean"])
def test_the_loss_accepts_all_number_and_flag_types(form, reduce_loss):
    logits = sample(2, 3, 11).requires_grad_()
    target = torch.tensor([[0, 10, 7], [1, 2, 7]])
    expected = torch_loss(logits, target, 0.125, "mean", 7)
    leaf = logits.detach().clone().requires_grad_()
    actual = te.parallel_cross_entropy(leaf * 1.0, target, form(0.125), reduce_loss, None, form(7))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual, leaf)[0], torch.autograd.grad(expected, logits)[0]
    )


def test_float64_logits_are_computed_in_float32():
    logits = sample(2, 3, 11).double().requires_grad_()
    target = torch.tensor([[0, 10, 3], [1, 2, 7]])
    loss = te.parallel_cross_entropy(logits, target)
    assert loss.dtype == torch.float32
    expected = torch_loss(logits, target)
    torch.testing.assert_close(loss.view(-1).double(), expected, atol=1e-6, rtol=1e-6)
    ours, reference = (torch.autograd.grad(y.sum(), logits)[0] for y in (loss, expected))
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours, reference, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", [(6,), (1, 6), (2, 3, 1), (6, 1), (2, 1, 3)])
def test_targets_may_have_size_one_axes_or_be_flat(shape):
    logits, target = sample(2, 3, 11), torch.tensor([[0, 10, 3], [1, 2, 7]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = te.parallel_cross_entropy(logits, target.view(shape))
    torch.testing.assert_close(result.view(-1), torch_loss(logits, target))


def test_targets_in_another_shape_are_read_in_row_major_order_with_a_warning():
    logits, target = sample(2, 3, 11), torch.tensor([[0, 10, 3], [1, 2, 7]])
    with pytest.warns(
        UserWarning, match=r"target is \[3, 2\], its ids are read in row-major order"
    ):
        result = te.parallel_cross_entropy(logits, target.view(3, 2))
    torch.testing.assert_close(result.view(-1), torch_loss(logits, target))
