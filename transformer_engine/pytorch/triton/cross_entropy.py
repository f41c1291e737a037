"""Cross-entropy loss and gradient over a sharded vocabulary, as two functions without autograd.

`te.parallel_cross_entropy` is the differentiable function. It stores two numbers per row for its backward pass, while
`cross_entropy_forward` returns the whole gradient in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..constants import dist_group_type
from ..cross_entropy import parallel_cross_entropy

__all__ = ["cross_entropy_backward", "cross_entropy_forward"]


def cross_entropy_forward(
    inp: Tensor,
    target: Tensor,
    label_smoothing: float,
    reduce_loss: bool,
    dist_process_group: dist_group_type | None,
    ignore_idx: int,
) -> tuple[Tensor, Tensor]:
    """Compute the loss and its gradient; the logits are not changed.

    Args:
        inp: Logits [B, S, V], for this rank's vocabulary share.
        target: Ids [B, S].
        label_smoothing: Share of the target probability that is spread evenly over all ids.
        reduce_loss: Return the mean over rows that count.
        dist_process_group: Group whose ranks hold the other shares; None for one device.
        ignore_idx: Target for rows that do not count.

    Returns:
        `(loss float32 [B, S], or a scalar, gradient float32 [B, S, V])`.
    """
    with torch.enable_grad():
        logits = inp.detach().float().requires_grad_()
        loss = parallel_cross_entropy(
            logits, target, label_smoothing, reduce_loss, dist_process_group, ignore_idx
        )
        (gradient,) = torch.autograd.grad(loss.sum(), logits)
    return loss.detach(), gradient


def cross_entropy_backward(
    grad: Tensor, grad_output: Tensor, is_cg_capturable: bool = False
) -> Tensor:
    """Multiply the gradient from `cross_entropy_forward` by the loss gradient, in place.

    Args:
        grad: Gradient [B, S, V].
        grad_output: Loss gradient: one number, or one for each row.
        is_cg_capturable: Has no effect; the host does not read `grad_output`.

    Returns:
        `grad`.
    """
    factor = grad_output if grad_output.numel() == 1 else grad_output.reshape(*grad.shape[:-1], 1)
    return grad.mul_(factor)
