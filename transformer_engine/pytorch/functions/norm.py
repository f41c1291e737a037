"""y [.., H] = normalize(x [.., H]) * gamma (+ beta), differentiable in x, gamma and beta."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.autograd import Function, check_transforms, disable_autocast
from ..runtime.double_backward import is_recorded, replay
from ..runtime.tracing import reshape_result
from ..tensor.storage.quantized_tensor_storage import plain_values
from .normalization import Norm


def normalize(x: Tensor, gamma: Tensor, beta: Tensor | None, norm: Norm) -> Tensor:
    """Return y, shaped like x, in which each vector along gamma's dimensions is normalized separately.

    x may have no rows and any strides; beta is None for a norm without beta.
    """
    if torch.is_grad_enabled():
        return _Normalize.apply(x, gamma, beta, norm)
    check_transforms(_Normalize.OPERATION, x, gamma, beta)
    return normalize_forward(x, gamma, beta, norm)[0]


@disable_autocast
def normalize_forward(
    x: Tensor, gamma: Tensor, beta: Tensor | None, norm: Norm
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Compute y, shaped like x, and mean (None for an RMSNorm) and rstdev, float32 per row."""
    x = plain_values(x)
    if gamma.dim() != 1:
        beta = None if beta is None else beta.reshape(-1)
        gamma = gamma.reshape(-1)
    y, mean, rstdev = norm.forward(x.reshape(-1, gamma.shape[0]), gamma, beta)
    return reshape_result(y, x.shape), mean, rstdev


def normalize_backward(
    dy: Tensor, x: Tensor, mean: Tensor | None, rstdev: Tensor, gamma: Tensor, norm: Norm
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute dx, shaped like x, and dgamma and dbeta, shaped like gamma; dbeta is None for an RMSNorm."""
    dy, x = plain_values(dy), plain_values(x)
    shape, rows = gamma.shape, (-1, gamma.numel())
    if len(shape) != 1:
        gamma = gamma.reshape(-1)
    dx, dgamma, dbeta = norm.backward(dy.reshape(rows), x.reshape(rows), mean, rstdev, gamma)
    if len(shape) != 1:
        dgamma, dbeta = dgamma.view(shape), None if dbeta is None else dbeta.view(shape)
    return dx.view(x.shape), dgamma, dbeta


class _Normalize(Function):
    OPERATION = "a norm"

    @staticmethod
    def forward(ctx, x, gamma, beta, norm):
        y, mean, rstdev = normalize_forward(x, gamma, beta, norm)
        ctx.save_for_backward(x, gamma, mean, rstdev)
        ctx.norm = norm
        return y

    @staticmethod
    def backward(ctx, dy):
        x, gamma, mean, rstdev = ctx.saved_tensors
        if is_recorded():
            # Functions on dy, x and gamma, for a backward pass through the backward pass.
            rows = (-1, gamma.numel())
            dx, dgamma = replay(
                lambda x, gamma: ctx.norm.by_torch(x.reshape(rows), gamma.reshape(-1)).view(
                    x.shape
                ),
                (x, gamma),
                dy,
            )
            dbeta = (
                dy.reshape(rows).float().sum(0).to(gamma.dtype).view(gamma.shape)
                if ctx.needs_input_grad[2]
                else None
            )
            return dx, dgamma, dbeta, None
        dx, dgamma, dbeta = normalize_backward(dy, x, mean, rstdev, gamma, ctx.norm)
        return dx, dgamma, dbeta if ctx.needs_input_grad[2] else None, None
