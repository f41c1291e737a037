"""Attention in compiled graphs: one operator for the forward pass and one for the backward pass.

transformer_engine::attention_forward and attention_backward take the call as text and the backend by name, because an
operator takes tensors, numbers and strings only.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import fields, replace
from typing import Any, cast

import torch
from torch import Tensor

from ....common.hardware import hardware_named
from ....common.memory import Memory
from ...runtime.operator_definition import define_operator
from ...runtime.tracing import constant_while_tracing
from . import reference
from .call import Attended, AttentionCall, AttentionInputs, Gradients, Switches
from .choose import TABLE, choose, choose_passes
from .mask import Mask
from .passes import Bound, Passes

BIAS = AttentionInputs._fields.index("bias")
SINK = AttentionInputs._fields.index("sink")

# Number of calls whose bound passes the operators cache.
CACHED_CALLS = 1024

# Fields that are records themselves. score_mod, which is code, is not written.
_NESTED = {"mask": Mask, "switches": Switches}
_FIELDS = {
    record: tuple(field.name for field in fields(record) if field.name != "score_mod")
    for record in (AttentionCall, *_NESTED.values())
}


def as_text(record: Any) -> str:
    """Return a call, without score_mod, as the text of a literal tuple, which a tracing compiler takes."""
    items = []
    for name in _FIELDS[type(record)]:
        value = getattr(record, name)
        if name in _NESTED:
            items.append(as_text(value))
        elif name == "hardware":
            items.append(f"({value.vendor!r}, {value.architecture!r})")
        else:
            items.append(f"{str(value)!r}" if name == "dtype" else f"{value!r}")
    return "(" + "".join(f"{item}, " for item in items) + ")"


@functools.lru_cache(maxsize=256)
def from_text(text: str) -> AttentionCall:
    """Return the call that `as_text` wrote."""
    fields: dict[str, Any] = dict(zip(_FIELDS[AttentionCall], ast.literal_eval(text), strict=True))
    for name, record in _NESTED.items():
        fields[name] = record(*fields[name])
    fields["hardware"] = hardware_named(*fields["hardware"])
    fields["dtype"] = getattr(torch, fields["dtype"].removeprefix("torch."))
    return AttentionCall(**fields)


def choose_when_traced(call: AttentionCall) -> Bound:
    """Choose a backend for a tracing compiler, which sees a constant: backends may query libraries."""
    if call.score_mod is not None:
        with_bprop = getattr(call.score_mod, "bprop", None) is not None
        backend = TABLE.named(_name_with_score_mod(as_text(call), with_bprop))
        assert backend.bind is not None
        return cast(Bound, backend.bind(call))
    return _when_traced(_choose_name(as_text(call)), call)


def choose_when_exported(call: AttentionCall) -> Bound:
    """Return the reference, in operations that ONNX can express, for an attention whose extents may be symbols.

    Raises:
        NotImplementedError: The call packs sequences, reads a cache, or drops probabilities.
    """
    for unsupported, reason in (
        (call.packed, "qkv_format='thd', whose extents depend on values; use 'sbhd' or 'bshd'"),
        (call.cached, "inference_params, which are state; pass all keys and values"),
        (
            call.dropout > 0.0,
            f"attention_dropout={call.dropout} in training mode; call eval() first",
        ),
    ):
        if unsupported:
            raise NotImplementedError(f"an attention for export does not support {reason}")
    return reference.WHOLE


def passes_when_traced(call: AttentionCall) -> Passes:
    """Choose a backend with separate passes for a tracing compiler."""
    passes = _when_traced(_name_of_passes(as_text(call)), call)
    assert isinstance(passes, Passes)
    return passes


@constant_while_tracing
def _choose_name(text: str) -> str:
    return choose(from_text(text)).name


@constant_while_tracing
def _name_with_score_mod(text: str, with_bprop: bool) -> str:
    # Text holds no code. Backends read only whether a score_mod is given, and whether it has a bprop.
    def score_mod(score: Tensor, *indices: Tensor) -> Tensor:
        return score

    score_mod.bprop = score_mod if with_bprop else None  # pyright: ignore[reportFunctionMemberAccess]
    return choose(replace(from_text(text), score_mod=score_mod)).name


@constant_while_tracing
def _name_of_passes(text: str) -> str:
    return choose_passes(from_text(text)).name


def _when_traced(name: str, call: AttentionCall) -> Bound:
    """Return a backend as a tracing compiler sees it: operators if it is opaque, otherwise its own operations."""
    backend = TABLE.named(name)
    if backend.opaque:
        return operator_passes(name)
    assert backend.bind is not None
    return backend.bind(call)  # pyright: ignore[reportReturnType]


def as_traced(passes: Passes) -> Passes:
    """Return passes chosen by an eager call for a compiler that traces only the backward pass."""
    return operator_passes(passes.name) if TABLE.named(passes.name).opaque else passes


def operator_passes(name: str) -> Passes:
    """Return the passes of a backend as calls to the two operators."""

    def forward(call: AttentionCall, inputs: AttentionInputs) -> Attended:
        results = torch.ops.transformer_engine.attention_forward(name, as_text(call), list(inputs))
        output, *rest = (
            x if returned else None
            for x, returned in zip(results, _returned_fields(call), strict=True)
        )
        assert output is not None
        return Attended(output, *rest)

    def backward(
        call: AttentionCall, inputs: AttentionInputs, attended: Attended, grad_output: Tensor
    ) -> Gradients:
        gradients = torch.ops.transformer_engine.attention_backward(
            name, as_text(call), list(inputs), list(attended), grad_output
        )
        bias, sink = inputs.bias is not None, inputs.sink is not None
        return Gradients(
            gradients[0],
            gradients[1],
            gradients[2],
            gradients[3] if bias else None,
            gradients[4] if sink else None,
        )

    return Passes(name, forward, backward)


def _passes_and_call(key: tuple[str, str]) -> tuple[Passes, AttentionCall]:
    """Return (passes, call) for a key (backend name, call text)."""
    name, text = key
    call, bind = from_text(text), TABLE.named(name).bind
    assert bind is not None
    passes = bind(call)
    assert isinstance(passes, Passes), (
        "the graph was traced with a backend that has separate passes"
    )
    return passes, call


_BY_TEXT: Memory[tuple[str, str], tuple[Passes, AttentionCall]] = Memory(
    _passes_and_call, CACHED_CALLS
)


def _returned_fields(call: AttentionCall) -> tuple[bool, ...]:
    """Return which `Attended` fields are tensors."""
    return True, call.needs_gradient, call.dropout > 0.0, call.max_logit


def _forward_operator(name: str, text: str, tensors: list[Tensor | None]) -> tuple[Tensor, ...]:
    passes, call = _BY_TEXT[name, text]
    attended = passes.forward(call, AttentionInputs(*tensors))  # pyright: ignore[reportArgumentType]
    nothing = attended.output.new_empty(0)
    pairs = zip(attended, _returned_fields(call), strict=True)
    return tuple(
        value.contiguous() if returned and value is not None else nothing.clone()
        for value, returned in pairs
    )


def _forward_shapes(name: str, text: str, tensors: list[Tensor | None]) -> tuple[Tensor, ...]:
    call, q = from_text(text), tensors[0]
    assert q is not None
    _, gradient, dropout, max_logit = _returned_fields(call)
    rows = (call.heads, q.shape[0]) if call.packed else (call.batch, call.heads, call.seqlen_q)
    return (
        q.new_empty(*q.shape[:-1], call.head_dim_v),
        q.new_empty(rows, dtype=torch.float32) if gradient else q.new_empty(0),
        q.new_empty(2, dtype=torch.int64) if dropout else q.new_empty(0),
        q.new_empty(call.heads, dtype=torch.float32) if max_logit else q.new_empty(0),
    )


def _backward_operator(
    name: str,
    text: str,
    tensors: list[Tensor | None],
    attended: list[Tensor | None],
    grad_output: Tensor,
) -> tuple[Tensor, ...]:
    inputs = AttentionInputs(*tensors)  # pyright: ignore[reportArgumentType]
    passes, call = _BY_TEXT[name, text]
    gradients = passes.backward(call, inputs, Attended(*attended), grad_output.contiguous())  # pyright: ignore[reportArgumentType]
    return tuple(grad_output.new_empty(0) if x is None else x.contiguous() for x in gradients)


def _backward_shapes(
    name: str,
    text: str,
    tensors: list[Tensor | None],
    attended: list[Tensor | None],
    grad_output: Tensor,
) -> tuple[Tensor, ...]:
    leaves = (*tensors[:3], tensors[BIAS], tensors[SINK])
    nothing = grad_output.new_empty(0)
    return tuple(nothing.clone() if x is None else x.new_empty(x.shape) for x in leaves)


define_operator(
    "transformer_engine",
    "attention_forward(str name, str call, Tensor?[] tensors) -> (Tensor, Tensor, Tensor, Tensor)",
    "CompositeExplicitAutograd",
    _forward_operator,
    _forward_shapes,
)
define_operator(
    "transformer_engine",
    "attention_backward(str name, str call, Tensor?[] tensors, Tensor?[] attended, Tensor grad_output)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "CompositeExplicitAutograd",
    _backward_operator,
    _backward_shapes,
)
