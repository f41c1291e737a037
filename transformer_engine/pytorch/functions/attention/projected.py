"""out [.., h * d] = attention(q, k, v), where q, k, v are the heads of one projection x [.., (h + 2 g) d]: one node.

The gradients of q, k and v are joined into dx where they are made, so that neither the views of x nor their gradients
are nodes of the graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...primitives.attention import reference
from ...primitives.attention.operators import BIAS, SINK
from ...primitives.attention.passes import Passes
from ...primitives.attention.request import (
    Attended,
    AttentionInputs,
    AttentionRequest,
    AttentionResult,
    Gradients,
)
from ...runtime.applying import applier
from ...runtime.double_backward import is_recorded, once_differentiable, replayed
from ..saving import take_saved
from ..split_heads import joined, parts_of, split_heads
from .autograd import gradients_of

# AttentionInputs begins with q, k and v.
_QKV = 3
_KEPT = 4  # x, the output and its statistics, ahead of what is given beside


class Projection(NamedTuple):
    """x [.., (h + 2 g) d], and whether heads lie in it group by group: see `split_heads`."""

    x: Tensor
    interleaved: bool

    @classmethod
    def of(cls, x: Tensor, interleaved: bool) -> Projection | None:
        """The record; None where no gradient is wanted, and the heads are all that is needed."""
        return cls(x, interleaved) if x.requires_grad and torch.is_grad_enabled() else None


def attend_projection(
    passes: Passes, request: AttentionRequest, projection: Projection, inputs: AttentionInputs
) -> AttentionResult:
    """The attention of a request, differentiable in the projection, bias and sink.

    inputs   with views of the projection, of which autograd knows nothing
    """
    x, interleaved = projection
    beside = inputs[_QKV:]
    for tensor in beside:  # any() of a generator takes 1.3 us longer, in every call
        if tensor is not None:
            break
    else:
        beside = ()
    return AttentionResult(*_apply(passes, request, interleaved, inputs, x, *beside))


def split_anew(inputs: AttentionInputs, request: AttentionRequest, projection: Projection) -> AttentionInputs:
    """The inputs with views of the projection that autograd knows of."""
    shape = request.shape
    q, k, v = split_heads(projection.x, shape.heads, shape.groups, shape.head_dim_qk, projection.interleaved)
    return inputs._replace(q=q, k=k, v=v)


class _ProjectedAttention(torch.autograd.Function):
    """Autograd shell of the split and of a backend's two passes; beside: AttentionInputs behind q, k, v, or nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        passes: Passes,
        request: AttentionRequest,
        interleaved: bool,
        inputs: AttentionInputs,
        x: Tensor,
        *beside: Any,
    ) -> Any:
        attended = passes.forward(request, inputs)
        output = attended.output.flatten(-2)
        if attended.max_logit is not None:
            ctx.mark_non_differentiable(attended.max_logit)
        ctx.passes, ctx.request, ctx.interleaved = passes, request, interleaved
        ctx.save_for_backward(x, output, attended.lse, attended.rng_state, *beside)
        return output, attended.max_logit

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> Any:
        if is_recorded() and ctx.request.options.dropout == 0.0:
            x, _, _, _, *beside = ctx.saved_tensors
            return None, None, None, None, *_differentiable_gradients(ctx, grad_output, x, beside)
        return _gradients(ctx, grad_output)


_apply = applier(_ProjectedAttention)


@once_differentiable("attention with dropout")
def _gradients(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
    kept = list(take_saved(ctx))
    given: list[Tensor | None] = [None] * (len(kept) - _KEPT)
    found = _of_passes(ctx, kept, grad_output)
    if given:
        given[BIAS - _QKV], given[SINK - _QKV] = found.bias, found.sink
    return None, None, None, None, joined(found.q, found.k, found.v, ctx.interleaved), *given


def _of_passes(ctx: Any, kept: list[Any], grad_output: Tensor) -> Gradients:
    """The gradients of q, k and v; what was kept for them is let go of."""
    shape = ctx.request.shape
    x, output, lse, rng_state, *beside = kept
    kept.clear()
    qkv = parts_of(x, shape.heads, shape.groups, shape.head_dim_qk, ctx.interleaved)
    inputs, attended = AttentionInputs(*qkv, *beside), Attended(output, lse, rng_state)
    return gradients_of(ctx.passes, ctx.request, inputs, attended, grad_output)


def _differentiable_gradients(
    ctx: Any, grad_output: Tensor, x: Tensor, beside: list[Tensor | None]
) -> list[Tensor | None]:
    """The gradients by dense matrices in torch operations, for a backward pass of the backward pass."""
    request = ctx.request
    shape = request.shape

    def attention(x: Tensor, *beside: Tensor | None) -> Tensor:
        qkv = parts_of(x, shape.heads, shape.groups, shape.head_dim_qk, ctx.interleaved)
        return reference.forward(request, AttentionInputs(*qkv, *beside)).output.flatten(-2)

    return replayed(attention, [x, *beside], grad_output)
