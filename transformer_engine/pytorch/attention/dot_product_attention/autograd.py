"""out [.., h * d_v], max_logit [h] = attend(kernels, request, inputs): one autograd shell for all backends.

A backend is a pair of plain functions. Eager code calls them directly; a tracing compiler sees them as the
operators transformer_engine::attention_forward and attention_backward, so that they need not be traceable
themselves. The operators get the request as text: an operator takes tensors, numbers and strings only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...double_backward import is_recorded, once_differentiable, replayed
from .request import Attended, AttentionInputs, AttentionRequest, AttentionResult, Gradients
from .text import as_text, from_text

_BIAS = AttentionInputs._fields.index("bias")
_SINK = AttentionInputs._fields.index("sink")


@dataclass(frozen=True)
class Kernels:
    """The two passes of one backend; traceable: made of torch operations that a compiler may see through."""

    name: str
    forward: Callable[[AttentionRequest, AttentionInputs], Attended]
    backward: Callable[[AttentionRequest, AttentionInputs, Attended, Tensor], Gradients]
    traceable: bool = False

    def __post_init__(self) -> None:
        _by_name[self.name] = self


_by_name: dict[str, Kernels] = {}


def attend(kernels: Kernels, request: AttentionRequest, inputs: AttentionInputs) -> AttentionResult:
    """The attention of a request, differentiable in q, k, v, bias and sink where the request needs it."""
    if request.needs_gradient:
        tensors = _apart(inputs) if torch.compiler.is_compiling() else inputs
        return AttentionResult(*Attention.apply(kernels, request, *tensors))
    attended = forward_of(kernels, request, inputs)
    return AttentionResult(attended.output.flatten(-2), attended.max_logit)


def _apart(inputs: AttentionInputs) -> list[Tensor | None]:
    """The tensors with aliases for repeated ones: Dynamo traces no autograd function that gets one tensor twice."""
    tensors: list[Tensor | None] = []
    for x in inputs:
        repeated = any(x is other for other in tensors)
        tensors.append(x.view_as(x) if x is not None and repeated else x)
    return tensors


class Attention(torch.autograd.Function):
    """Autograd shell of a backend's two passes."""

    @staticmethod
    def forward(ctx: Any, kernels: Kernels, request: AttentionRequest, *tensors: Any) -> Any:
        attended = forward_of(kernels, request, AttentionInputs(*tensors))
        # reshape of a fresh tensor: for an output that is a view, torch.compile of torch 2.11 gives zero gradients
        shape = attended.output.shape
        output = attended.output.reshape(*shape[:-2], shape[-2] * shape[-1])
        ctx.kernels, ctx.request = kernels, request
        ctx.save_for_backward(*tensors, output, attended.lse, attended.rng_state)
        if attended.max_logit is not None:
            ctx.mark_non_differentiable(attended.max_logit)
        return output, attended.max_logit

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> Any:
        if is_recorded() and ctx.request.dropout == 0.0:
            return None, None, *_differentiable_gradients(ctx, grad_output)
        return _gradients(ctx, grad_output)


@once_differentiable("attention with dropout")
def _gradients(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
    request = ctx.request
    *tensors, output, lse, rng_state = ctx.saved_tensors
    inputs = AttentionInputs(*tensors)
    heads = (request.heads, request.head_dim_v)
    attended = Attended(output.unflatten(-1, heads), lse, rng_state)
    gradients = backward_of(ctx.kernels, request, inputs, attended, grad_output.unflatten(-1, heads))
    given: list[Tensor | None] = [None] * len(tensors)
    given[:3] = gradients[:3]
    given[_BIAS], given[_SINK] = gradients.bias, gradients.sink
    return None, None, *given


def _differentiable_gradients(ctx: Any, grad_output: Tensor) -> list[Tensor | None]:
    """The gradients by dense matrices in torch operations, for a backward pass of the backward pass.

    A mask of dropout is a kernel's own, which these operations cannot repeat.
    """
    request = ctx.request
    *tensors, _, _, _ = ctx.saved_tensors

    def attention(*tensors: Tensor | None) -> Tensor:
        inputs = AttentionInputs(*tensors)  # pyright: ignore[reportArgumentType]
        return _by_name["reference"].forward(request, inputs).output.flatten(-2)

    return replayed(attention, tensors, grad_output)


def forward_of(kernels: Kernels, request: AttentionRequest, inputs: AttentionInputs) -> Attended:
    """The forward pass; a tracing compiler sees one operator."""
    if kernels.traceable or not torch.compiler.is_compiling():
        return kernels.forward(request, inputs)
    found = torch.ops.transformer_engine.attention_forward(kernels.name, as_text(request), list(inputs))
    output, *others = (x if wanted else None for x, wanted in zip(found, _returned(request), strict=True))
    assert output is not None
    return Attended(output, *others)


def backward_of(
    kernels: Kernels,
    request: AttentionRequest,
    inputs: AttentionInputs,
    attended: Attended,
    grad_output: Tensor,
) -> Gradients:
    """The backward pass; a tracing compiler sees one operator.

    Kernels get the gradient in the output's layout: some take another for that one, and give wrong gradients.
    """
    if not torch.compiler.is_compiling():
        return kernels.backward(request, inputs, attended, grad_output.contiguous())
    if kernels.traceable:
        return kernels.backward(request, inputs, attended, grad_output.contiguous())
    found = torch.ops.transformer_engine.attention_backward(
        kernels.name, as_text(request), list(inputs), list(attended), grad_output
    )
    return Gradients(*found[:3], *(found[i] if _differentiable(inputs)[i - 3] else None for i in (3, 4)))


def _returned(request: AttentionRequest) -> tuple[bool, ...]:
    """Which fields of Attended are there."""
    return True, request.needs_gradient, request.dropout > 0.0, request.max_logit


def _differentiable(inputs: AttentionInputs) -> tuple[bool, bool]:
    return inputs.bias is not None, inputs.sink is not None


def _forward_operator(name: str, text: str, tensors: list[Tensor | None]) -> tuple[Tensor, ...]:
    request = from_text(text)
    attended = _by_name[name].forward(request, AttentionInputs(*tensors))  # pyright: ignore[reportArgumentType]
    nothing = attended.output.new_empty(0)
    wanted = zip(attended, _returned(request), strict=True)
    return tuple(
        value.contiguous() if want and value is not None else nothing.clone() for value, want in wanted
    )


def _forward_shapes(name: str, text: str, tensors: list[Tensor | None]) -> tuple[Tensor, ...]:
    request, q = from_text(text), tensors[0]
    assert q is not None
    _, gradient, dropout, max_logit = _returned(request)
    rows = (request.heads, q.shape[0]) if request.packed else (request.batch, request.heads, request.seqlen_q)
    return (
        q.new_empty(*q.shape[:-1], request.head_dim_v),
        q.new_empty(rows, dtype=torch.float32) if gradient else q.new_empty(0),
        q.new_empty(2, dtype=torch.int64) if dropout else q.new_empty(0),
        q.new_empty(request.heads, dtype=torch.float32) if max_logit else q.new_empty(0),
    )


def _backward_operator(
    name: str, text: str, tensors: list[Tensor | None], attended: list[Tensor | None], grad_output: Tensor
) -> tuple[Tensor, ...]:
    inputs = AttentionInputs(*tensors)  # pyright: ignore[reportArgumentType]
    found = _by_name[name].backward(from_text(text), inputs, Attended(*attended), grad_output.contiguous())  # pyright: ignore[reportArgumentType]
    return tuple(grad_output.new_empty(0) if x is None else x.contiguous() for x in found)


def _backward_shapes(
    name: str, text: str, tensors: list[Tensor | None], attended: list[Tensor | None], grad_output: Tensor
) -> tuple[Tensor, ...]:
    leaves = (*tensors[:3], tensors[_BIAS], tensors[_SINK])
    nothing = grad_output.new_empty(0)
    return tuple(nothing.clone() if x is None else x.new_empty(x.shape) for x in leaves)


def _define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    qualified = "transformer_engine::" + schema[: schema.index("(")]
    torch.library.define(qualified, schema[schema.index("(") :], tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(qualified, "CompositeExplicitAutograd", implementation)
    torch.library.register_fake(qualified, fake)


_define(
    "attention_forward(str name, str request, Tensor?[] tensors) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward_operator,
    _forward_shapes,
)
_define(
    "attention_backward(str name, str request, Tensor?[] tensors, Tensor?[] attended, Tensor grad_output)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_operator,
    _backward_shapes,
)
