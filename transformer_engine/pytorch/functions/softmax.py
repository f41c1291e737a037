"""y [.., q, k] = softmax(scale * x) over the keys that are seen, differentiable in x."""

from __future__ import annotations

from torch import Tensor

from ..primitives.softmax import reference, scaled_softmax_backward, scaled_softmax_forward
from ..runtime.autograd import Function
from ..runtime.double_backward import is_recorded


def scaled_softmax(
    x: Tensor, scale: float, mask: Tensor | None = None, causal: str | None = None
) -> Tensor:
    """y in x's dtype; mask and causal as `primitives.softmax.scaled_softmax_forward` takes them; saves y only."""
    return _ScaledSoftmax.apply(x, scale, mask, causal)


class _ScaledSoftmax(Function):
    OPERATION = "a scaled softmax"

    @staticmethod
    def forward(ctx, x, scale, mask, causal):
        y = scaled_softmax_forward(x, scale, mask=mask, causal=causal)
        ctx.save_for_backward(y)
        ctx.scale, ctx.causal = scale, causal
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        if is_recorded():  # a function of y, which depends on x through this node
            return reference.backward(dy, y, ctx.scale, ctx.causal), None, None, None
        return scaled_softmax_backward(dy, y, ctx.scale, causal=ctx.causal), None, None, None
