"""out [.., h * d_v], max_logit [h] = attend(bound, request, inputs): one autograd shell for all backends.

A backend is a pair of plain functions, or says that it is differentiable as a whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...primitives.attention import reference
from ...primitives.attention.operators import BIAS, SINK, as_traced
from ...primitives.attention.passes import Bound, Passes
from ...primitives.attention.request import (
    Attended,
    AttentionInputs,
    AttentionRequest,
    AttentionResult,
    Gradients,
)
from ...runtime.double_backward import is_recorded, once_differentiable, replayed


def attend(bound: Bound, request: AttentionRequest, inputs: AttentionInputs) -> AttentionResult:
    """The attention of a request, differentiable in q, k, v, bias and sink where the request needs it."""
    if type(bound) is Passes and request.options.needs_gradient:
        return AttentionResult(*Attention.apply(bound, request, *inputs))
    return bound(request, inputs)


def apart(inputs: AttentionInputs) -> AttentionInputs:
    """The tensors with aliases for repeated ones: Dynamo traces no autograd function that gets one tensor twice."""
    tensors: list[Tensor | None] = []
    for x in inputs:
        repeated = any(x is other for other in tensors)
        tensors.append(x.view_as(x) if x is not None and repeated else x)
    return AttentionInputs(*tensors)  # pyright: ignore[reportArgumentType]


class Attention(torch.autograd.Function):
    """Autograd shell of a backend's two passes."""

    @staticmethod
    def forward(ctx: Any, passes: Passes, request: AttentionRequest, *tensors: Any) -> Any:
        attended = passes.forward(request, AttentionInputs(*tensors))
        # reshape of a fresh tensor: for an output that is a view, torch.compile of torch 2.11 gives zero gradients
        shape = attended.output.shape
        output = attended.output.reshape(*shape[:-2], shape[-2] * shape[-1])
        ctx.passes, ctx.request = passes, request
        ctx.save_for_backward(*tensors, output, attended.lse, attended.rng_state)
        if attended.max_logit is not None:
            ctx.mark_non_differentiable(attended.max_logit)
        return output, attended.max_logit

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> Any:
        if is_recorded() and ctx.request.options.dropout == 0.0:
            return None, None, *_differentiable_gradients(ctx, grad_output)
        return _gradients(ctx, grad_output)


@once_differentiable("attention with dropout")
def _gradients(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
    request = ctx.request
    *tensors, output, lse, rng_state = ctx.saved_tensors
    passes = as_traced(ctx.passes) if torch.compiler.is_compiling() else ctx.passes
    gradients = gradients_of(
        passes, request, AttentionInputs(*tensors), Attended(output, lse, rng_state), grad_output
    )
    given: list[Tensor | None] = [None] * len(tensors)
    given[:3] = gradients[:3]
    given[BIAS], given[SINK] = gradients.bias, gradients.sink
    return None, None, *given


def gradients_of(
    passes: Passes,
    request: AttentionRequest,
    inputs: AttentionInputs,
    attended: Attended,
    grad_output: Tensor,
) -> Gradients:
    """The gradients by a backend's pass; output and gradient [.., h * d_v], as the nodes have them."""
    shape = (*grad_output.shape[:-1], request.shape.heads, request.shape.head_dim_v)
    attended = Attended(attended.output.view(shape), attended.lse, attended.rng_state)
    # In the output's layout: some kernels take another one for it, and give wrong gradients.
    return passes.backward(request, inputs, attended, grad_output.contiguous().view(shape))


def _differentiable_gradients(ctx: Any, grad_output: Tensor) -> list[Tensor | None]:
    """The gradients by dense matrices in torch operations, for a backward pass of the backward pass.

    A mask of dropout is a kernel's own, which these operations cannot repeat.
    """
    request = ctx.request
    *tensors, _, _, _ = ctx.saved_tensors

    def attention(*tensors: Tensor | None) -> Tensor:
        inputs = AttentionInputs(*tensors)  # pyright: ignore[reportArgumentType]
        return reference.forward(request, inputs).output.flatten(-2)

    return replayed(attention, tensors, grad_output)
