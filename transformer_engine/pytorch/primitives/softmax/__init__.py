"""y [.., q, k] = softmax(scale * x) over the keys that are not masked, its gradient, and the backend table."""

from __future__ import annotations

import torch
from torch import Tensor

from ....common.dispatch import Operator, Table
from ...runtime.launching import operator
from . import reference, triton
from .reference import CAUSAL, SoftmaxRequest

__all__ = ["CAUSAL", "TABLE", "SoftmaxRequest", "scaled_softmax_backward", "scaled_softmax_forward"]


def scaled_softmax_forward(
    x: Tensor, scale: float, *, mask: Tensor | None = None, causal: str | None = None
) -> Tensor:
    """y [.., q, k] = softmax(scale * x) along the last axis, computed in float32, in x's dtype, contiguous.

    A hidden key has probability 0. A query without visible keys gets zeros.

    Args:
        x: Scores [.., q, k].
        scale: Score factor.
        mask: bool or uint8, nonzero where a key is hidden, broadcastable to x.
        causal: "top_left": query i sees the keys j <= i; "bottom_right": j <= i + k - q.
    """
    _check(x, causal)
    layout = None
    if mask is not None:
        if mask.dtype not in (torch.bool, torch.uint8):
            raise TypeError(
                f"a mask is bool or uint8, not {mask.dtype}; convert it, not 0 where a key is hidden"
            )
        extents = zip(reversed(mask.shape), reversed(x.shape), strict=False)
        if mask.dim() > x.dim() or not all(extent in (1, full) for extent, full in extents):
            raise ValueError(
                f"a mask {list(mask.shape)} does not broadcast to the scores {list(x.shape)}; make it so"
            )
        layout = (mask.shape, mask.stride())
    return TABLE.bound(("forward", x.shape, x.dtype, x.device, causal, scale, layout))(x, mask)


def scaled_softmax_backward(
    dy: Tensor, y: Tensor, scale: float, *, causal: str | None = None
) -> Tensor:
    """dx [.., q, k] = scale * y * (dy - sum(dy * y)), in y's dtype, contiguous.

    With `causal`, the keys that it hides are not read; the gradient is the same. dy must be finite where y is zero for
    another reason.
    """
    _check(y, causal)
    if dy.shape != y.shape:
        raise ValueError(
            f"dy is {list(dy.shape)} and y {list(y.shape)}; give the gradient of that y"
        )
    return TABLE.bound(("backward", y.shape, y.dtype, y.device, causal, scale))(dy, y)


def _check(x: Tensor, causal: str | None) -> None:
    if x.dim() < 2:
        raise ValueError(
            f"scores are [.., queries, keys], not {list(x.shape)}; add the missing axes"
        )
    if causal is not None and causal not in CAUSAL:
        raise ValueError(f"causal={causal!r}; choose None, {' or '.join(CAUSAL)}")


_OPERATORS = {
    "forward": operator(
        "scaled_softmax_forward(Tensor x, Tensor? mask, float scale, str? causal) -> Tensor",
        lambda x, mask, scale, causal: scaled_softmax_forward(x, scale, mask=mask, causal=causal),
        lambda x, mask, scale, causal: x.new_empty(x.shape),
    ),
    "backward": operator(
        "scaled_softmax_backward(Tensor dy, Tensor y, float scale, str? causal) -> Tensor",
        lambda dy, y, scale, causal: scaled_softmax_backward(dy, y, scale, causal=causal),
        lambda dy, y, scale, causal: y.new_empty(y.shape),
    ),
}


TABLE: Table[SoftmaxRequest] = Table(
    "softmax",
    (triton.BACKEND, reference.BACKEND),
    describe=SoftmaxRequest,
    operator=lambda request: _OPERATORS[request.operation].given(
        scale=request.scale, causal=request.causal
    ),
)
