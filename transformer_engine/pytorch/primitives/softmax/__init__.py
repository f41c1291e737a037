"""y [.., q, k] = softmax(scale * x) over the keys that are seen, its gradient, and the table of backends.

A backend's `run` takes the name of one of the two operations and returns the function that computes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....common.dispatch import Table
from . import reference, triton
from .request import CAUSAL, SoftmaxRequest

__all__ = ["CAUSAL", "TABLE", "SoftmaxRequest", "scaled_softmax_backward", "scaled_softmax_forward"]

TABLE: Table[SoftmaxRequest] = Table("softmax", (triton.BACKEND, reference.BACKEND))


def scaled_softmax_forward(
    x: Tensor, scale: float, *, mask: Tensor | None = None, causal: str | None = None
) -> Tensor:
    """y [.., q, k] = softmax(scale * x) along the last axis, float32 inside, in x's dtype, contiguous.

    mask     bool or uint8, not 0 where a key is hidden, broadcastable to x
    causal   "top_left": query i sees the keys j <= i; "bottom_right": j <= i + k - q
    A hidden key has probability 0; a query that sees no key gets zeros.
    """
    _check(x, causal)
    if mask is not None:
        _check_mask(x, mask)
    request = SoftmaxRequest("forward", x.shape, x.dtype, x.device, mask is not None, causal)
    return TABLE.select(request).run("forward")(x, scale, mask, causal)


def scaled_softmax_backward(dy: Tensor, y: Tensor, scale: float, *, causal: str | None = None) -> Tensor:
    """dx [.., q, k] = scale * y * (dy - sum(dy * y)), in y's dtype, contiguous.

    causal leaves out the keys that y is zero for: the same gradient for less reading. dy has to be finite where
    y is zero for another reason.
    """
    _check(y, causal)
    if dy.shape != y.shape:
        raise ValueError(f"dy is {list(dy.shape)} and y {list(y.shape)}; give the gradient of that y")
    request = SoftmaxRequest("backward", y.shape, y.dtype, y.device, False, causal)
    return TABLE.select(request).run("backward")(dy, y, scale, causal)


def _check(x: Tensor, causal: str | None) -> None:
    if x.dim() < 2:
        raise ValueError(f"scores are [.., queries, keys], not {list(x.shape)}; add the missing axes")
    if causal is not None and causal not in CAUSAL:
        raise ValueError(f"causal={causal!r}; choose None, {' or '.join(CAUSAL)}")


def _check_mask(x: Tensor, mask: Tensor) -> None:
    if mask.dtype not in (torch.bool, torch.uint8):
        raise TypeError(f"a mask is bool or uint8, not {mask.dtype}; convert it, not 0 where a key is hidden")
    fits = mask.dim() <= x.dim() and all(
        extent in (1, whole) for extent, whole in zip(reversed(mask.shape), reversed(x.shape), strict=False)
    )
    if not fits:
        raise ValueError(
            f"a mask {list(mask.shape)} does not broadcast to the scores {list(x.shape)}; make it so"
        )
