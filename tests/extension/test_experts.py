"""The extension's names for experts: the same values and gradients as the public functions."""

from __future__ import annotations

import pytest
import torch

import transformer_engine_torch as tex
from transformer_engine.pytorch import moe_permute, moe_unpermute
from transformer_engine.pytorch.router import (
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)

T, E, K, H = 10, 12, 2, 32
FLOAT = tex.DType.kFloat32


@pytest.fixture
def experts(device) -> torch.Tensor:
    return torch.rand(T, E).topk(K, dim=1).indices.int().to(device)


def test_permute_and_unpermute_by_index(experts, device):
    x = torch.randn(T, H, device=device, requires_grad=True)
    probs = torch.rand(T, K, device=device, requires_grad=True)
    y, row_id_map, workspace = tex.moe_permute_fwd(x.detach(), FLOAT, experts, -1, [], 0)
    expected, expected_map = moe_permute(x, experts, map_type="index")
    assert torch.equal(y, expected) and torch.equal(row_id_map, expected_map) and workspace == []
    back = moe_unpermute(expected, row_id_map, probs, map_type="index")
    assert torch.equal(tex.moe_unpermute_fwd(y, FLOAT, row_id_map, probs.detach(), T, K), back)
    dback = torch.randn_like(back)
    dy, dprobs = tex.moe_unpermute_bwd(dback, y, FLOAT, row_id_map, probs.detach())
    dx = tex.moe_permute_bwd(dy, FLOAT, row_id_map, None, T, K)
    reference = torch.autograd.grad(back, (x, probs), dback)
    for actual, gradient in zip((dx, dprobs), reference, strict=True):
        torch.testing.assert_close(actual, gradient)


def test_rows_are_padded_and_unpadded_in_place(device):
    x = torch.randn(9, H, device=device)
    padded = torch.full((12, H), 7.0, device=device)
    tex.fused_multi_row_padding(x, padded, [3, 0, 6], [4, 0, 8])
    assert torch.equal(padded[:3], x[:3]) and torch.equal(padded[4:10], x[3:])
    assert padded[[3, 10, 11]].abs().sum() == 0
    back = torch.empty_like(x)
    tex.fused_multi_row_unpadding(padded, back, [4, 0, 8], [3, 0, 6])
    assert torch.equal(back, x)


def test_rows_that_do_not_fit_are_rejected_before_anything_is_written(device):
    x, out = torch.ones(9, H, device=device), torch.zeros(12, H, device=device)
    with pytest.raises(ValueError, match=r"groups of \[3, 5\] rows, padded to \[4, 8\]"):
        tex.fused_multi_row_padding(x, out, [3, 5], [4, 8])
    assert out.abs().sum() == 0


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("dense", [False, True], ids=["map", "indices"])
def test_the_experts_of_tokens_and_their_gradient(device, score, dense):
    x = torch.randn(T, E, device=device, requires_grad=True)
    indices = torch.empty(T, K, dtype=torch.int32, device=device) if dense else None
    choice = (K, False, None, None, 2.0, score, None)
    probs, routing, intermediate = tex.fused_topk_with_score_function_fwd(
        x.detach(), *choice, topk_indices=indices
    )
    expected, expected_map = fused_topk_with_score_function(x, *choice)
    assert torch.equal(probs, expected)
    assert routing is indices if dense else torch.equal(routing, expected_map)
    gradient, grad_logits = torch.randn_like(probs), torch.empty_like(x)
    tex.fused_topk_with_score_function_bwd(
        routing, intermediate, gradient, grad_logits, K, False, 2.0, score, use_dense_indices=dense
    )
    assert torch.equal(grad_logits, torch.autograd.grad(expected, x, gradient)[0])


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_the_scores_of_all_experts_and_their_gradient(device, score):
    x = torch.randn(T, E, device=device, requires_grad=True)
    scores, routing, intermediate = tex.fused_score_for_moe_aux_loss_fwd(x.detach(), K, score)
    expected_map, expected = fused_compute_score_for_moe_aux_loss(x, K, score)
    assert torch.equal(scores, expected) and torch.equal(routing, expected_map)
    gradient, grad_logits = torch.randn_like(scores), torch.empty_like(x)
    tex.fused_score_for_moe_aux_loss_bwd(intermediate, gradient, grad_logits, K, score)
    assert torch.equal(grad_logits, torch.autograd.grad(expected, x, gradient)[0])


@pytest.mark.parametrize("graph_safe", [False, True])
def test_the_balancing_loss_and_its_gradient(device, graph_safe):
    probs = torch.rand(T, E, device=device, requires_grad=True)
    tokens = torch.arange(E, device=device, dtype=torch.int32)
    forward = tex.fused_moe_aux_loss_fwd_graph_safe if graph_safe else tex.fused_moe_aux_loss_fwd
    total = torch.tensor(T, device=device) if graph_safe else T
    loss, constant = forward(probs.detach(), tokens, total, E, T, E, K, 0.01)
    expected = fused_moe_aux_loss(probs, tokens, T, E, K, 0.01)
    torch.testing.assert_close(loss, expected)
    result = tex.fused_moe_aux_loss_bwd(constant, tokens, T, E, torch.ones_like(loss))
    torch.testing.assert_close(result, torch.autograd.grad(expected, probs)[0])
