"""The two passes of an attention as a tracing compiler sees them: one operator each.

transformer_engine::attention_forward and attention_backward get the request as text and the backend by its name: an
operator takes tensors, numbers and strings only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from ....common.memory import Memory
from ...runtime.tracing import constant_while_tracing
from .choose import TABLE, choose, passes_of
from .passes import Bound, Passes
from .request import Attended, AttentionInputs, AttentionRequest, Gradients
from .serialized import as_text, from_text

BIAS = AttentionInputs._fields.index("bias")
SINK = AttentionInputs._fields.index("sink")

# Requests that the operators remember the passes of.
REMEMBERED = 1024


def choose_when_traced(request: AttentionRequest) -> Bound:
    """choose(request) for a tracing compiler, which sees a constant: refusals may ask libraries."""
    if request.options.score_mod is not None:
        return cast(Bound, TABLE.bound((request.shape, request.options, request.device)))
    return _when_traced(_chosen_name(as_text(request)), request)


def passes_when_traced(request: AttentionRequest) -> Passes:
    """passes_of(request) for a tracing compiler."""
    passes = _when_traced(_name_of_passes(as_text(request)), request)
    assert isinstance(passes, Passes)
    return passes


@constant_while_tracing
def _chosen_name(text: str) -> str:
    return choose(from_text(text)).name


@constant_while_tracing
def _name_of_passes(text: str) -> str:
    return passes_of(from_text(text)).name


def _when_traced(name: str, request: AttentionRequest) -> Bound:
    """A backend as a tracing compiler is to see it: by operators, unless it can look into it."""
    backend = TABLE.named(name)
    if backend.opaque:
        return by_operators(name)
    assert backend.bind is not None
    return backend.bind(request)  # pyright: ignore[reportReturnType]


def as_traced(passes: Passes) -> Passes:
    """Passes that an eager call has chosen, for a compiler that traces the backward pass alone."""
    return by_operators(passes.name) if TABLE.named(passes.name).opaque else passes


def by_operators(name: str) -> Passes:
    """The passes of a backend as calls of the two operators."""

    def forward(request: AttentionRequest, inputs: AttentionInputs) -> Attended:
        found = torch.ops.transformer_engine.attention_forward(name, as_text(request), list(inputs))
        output, *others = (x if wanted else None for x, wanted in zip(found, _returned(request), strict=True))
        assert output is not None
        return Attended(output, *others)

    def backward(
        request: AttentionRequest, inputs: AttentionInputs, attended: Attended, grad_output: Tensor
    ) -> Gradients:
        found = torch.ops.transformer_engine.attention_backward(
            name, as_text(request), list(inputs), list(attended), grad_output
        )
        bias, sink = inputs.bias is not None, inputs.sink is not None
        return Gradients(found[0], found[1], found[2], found[3] if bias else None, found[4] if sink else None)

    return Passes(name, forward, backward)


def _named(key: tuple[str, str]) -> tuple[Passes, AttentionRequest]:
    """(passes of a backend, request): from their names, for the operators."""
    name, text = key
    request, bind = from_text(text), TABLE.named(name).bind
    assert bind is not None
    passes = bind(request)
    assert isinstance(passes, Passes), "the choice that the graph was made with has been planned"
    return passes, request


_NAMED: Memory[tuple[str, str], tuple[Passes, AttentionRequest]] = Memory(_named, REMEMBERED)


def _returned(request: AttentionRequest) -> tuple[bool, ...]:
    """Which fields of Attended are there."""
    return True, request.options.needs_gradient, request.options.dropout > 0.0, request.options.max_logit


def _forward_operator(name: str, text: str, tensors: list[Tensor | None]) -> tuple[Tensor, ...]:
    passes, request = _NAMED[name, text]
    attended = passes.forward(request, AttentionInputs(*tensors))  # pyright: ignore[reportArgumentType]
    nothing = attended.output.new_empty(0)
    wanted = zip(attended, _returned(request), strict=True)
    return tuple(
        value.contiguous() if want and value is not None else nothing.clone() for value, want in wanted
    )


def _forward_shapes(name: str, text: str, tensors: list[Tensor | None]) -> tuple[Tensor, ...]:
    request, q = from_text(text), tensors[0]
    assert q is not None
    _, gradient, dropout, max_logit = _returned(request)
    shape = request.shape
    rows = (shape.heads, q.shape[0]) if request.packed else (shape.batch, shape.heads, shape.seqlen_q)
    return (
        q.new_empty(*q.shape[:-1], shape.head_dim_v),
        q.new_empty(rows, dtype=torch.float32) if gradient else q.new_empty(0),
        q.new_empty(2, dtype=torch.int64) if dropout else q.new_empty(0),
        q.new_empty(shape.heads, dtype=torch.float32) if max_logit else q.new_empty(0),
    )


def _backward_operator(
    name: str, text: str, tensors: list[Tensor | None], attended: list[Tensor | None], grad_output: Tensor
) -> tuple[Tensor, ...]:
    inputs = AttentionInputs(*tensors)  # pyright: ignore[reportArgumentType]
    passes, request = _NAMED[name, text]
    found = passes.backward(request, inputs, Attended(*attended), grad_output.contiguous())  # pyright: ignore[reportArgumentType]
    return tuple(grad_output.new_empty(0) if x is None else x.contiguous() for x in found)


def _backward_shapes(
    name: str, text: str, tensors: list[Tensor | None], attended: list[Tensor | None], grad_output: Tensor
) -> tuple[Tensor, ...]:
    leaves = (*tensors[:3], tensors[BIAS], tensors[SINK])
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
