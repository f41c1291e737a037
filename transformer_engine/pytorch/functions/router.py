"""probs [T, E] of the experts of each token, differentiable in logits, and the loss that balances experts."""

from __future__ import annotations

import torch
from torch import Tensor

from ..primitives.router import balance_loss, choose, choose_backward
from ..runtime.autograd import Function
from ..runtime.double_backward import once_differentiable


def balancing_gradient(
    grad_loss: Tensor, tokens: Tensor, factor: float, total: Tensor | None, shape: torch.Size
) -> Tensor:
    """Every row in the gradient of probs [rows, columns]: factor / total^2 * tokens * grad_loss; rows are repeated."""
    row = tokens.to(torch.float32) * (factor * grad_loss.to(torch.float32))
    if total is not None:
        count = total.to(torch.float32)
        row = row / count / count
    return row.to(grad_loss.dtype).expand(shape)


class ChosenExperts(Function):
    """Return (probs [T, E], map, or the indices [T, k] if they are given), see `primitives.router.choose`.

    The choice and the bias have no gradient.
    """

    @staticmethod
    def forward(ctx, logits, bias, indices, choice, dtype):
        probs, map, scores = choose(logits, choice, dtype, bias, indices, ctx.needs_input_grad[0])
        if indices is not None:
            ctx.mark_dirty(indices)
            map = indices
        ctx.mark_non_differentiable(map)
        ctx.save_for_backward(map, scores)
        ctx.choice, ctx.dtype = choice, logits.dtype
        return probs, map

    @staticmethod
    @once_differentiable("the router")
    def backward(ctx, grad_probs, _):
        map, scores = ctx.saved_tensors
        return (
            choose_backward(map, scores, grad_probs, ctx.choice, ctx.dtype),
            None,
            None,
            None,
            None,
        )


class BalancingLoss(Function):
    """Compute factor / total^2 * sum over c of tokens[c] * sum over r of probs[r, c]; differentiable in probs."""

    @staticmethod
    def forward(ctx, probs, tokens, factor, total):
        ctx.save_for_backward(tokens, total)
        ctx.factor, ctx.shape = factor, probs.shape
        return balance_loss(probs, tokens, factor, total)[0]

    @staticmethod
    @once_differentiable("fused_moe_aux_loss")
    def backward(ctx, grad_loss):
        tokens, total = ctx.saved_tensors
        return balancing_gradient(grad_loss, tokens, ctx.factor, total, ctx.shape), None, None, None
