"""Run consecutive operations as one forward pass and one backward pass, fused where kernels compute more than one.

The passes of an operation in one kind of call are an `OperationPasses`. `forward` and `backward` call them one after
another. Each gets the cast of its neighbor, and pairs of `passes/patterns.py` are computed together. Operations that
run alone go through the same functions, so the passes of a chain are compared with those of its operations one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..functions.layer import runners
from ..functions.saving import pack, unpack, wait_for_saved
from ..offload.marks import active as offloading
from ..offload.marks import mark_ready
from ..quantization.autocast import current
from ..runtime.autograd import without_autocast
from ..runtime.device import autocast_dtype
from .passes.contract import (
    BackwardResult,
    ForwardResult,
    Given,
    InputFacts,
    OperationCall,
    OperationPasses,
    ReaderCast,
    Value,
)
from .passes.patterns import BACKWARD, FORWARD

_SHAPES = (tuple, torch.Size)  # saved values that are not tensors


class ForwardResults(NamedTuple):
    """Results of a chain's forward pass.

    Attributes:
        output: The main output.
        extra: Extra outputs by operation.
    """

    output: Any
    extra: list[tuple[Any, ...]]


class PassState(NamedTuple):
    """Non-tensor state that the forward pass of an operation leaves in its context."""

    passes: OperationPasses
    forms: list[Any]
    shapes: dict[int, Any]


class _Unfused:
    """Whether operations run without fusion, which tests compare with."""

    blocks = 0


def fusion_enabled() -> bool:
    """Whether kernels may compute several operations, which is so outside of `unfused` blocks."""
    return not _Unfused.blocks


@contextmanager
def unfused() -> Iterator[None]:
    """Run operations without fusion inside of the block."""
    _Unfused.blocks += 1
    try:
        yield
    finally:
        _Unfused.blocks -= 1


def describe(
    ops: Sequence[Any],
    ctxs: Sequence[Any],
    x: Any,
    extra_inputs: Sequence[Sequence[Tensor]],
    options: Sequence[dict[str, Any]],
    records: bool,
) -> tuple[list[OperationPasses], list[list[Tensor]]]:
    """Passes of operations for one call, and by operation the parameters that they read; see `run_forward`."""
    facts, state = InputFacts.of(x), current()
    passes: list[OperationPasses] = []
    tensors: list[list[Tensor]] = []
    traced, narrowed = torch.compiler.is_compiling(), autocast_dtype(x.device.type)
    for i, (op, ctx) in enumerate(zip(ops, ctxs, strict=True)):
        extra = tuple([InputFacts.of(tensor) for tensor in extra_inputs[i]])
        call = OperationCall(
            state,
            narrowed,
            traced,
            ctx.requires_grad,
            ctx.input_requires_grad,
            records,
            extra,
            tuple(extra_inputs[i]),
            options[i],
        )
        check_options(op, options[i])
        made, facts = op.passes(facts, call)
        passes.append(made)
        tensors.append(list(op.pass_parameters().values()))
    return passes, tensors


def check_options(op: Any, options: dict[str, Any]) -> None:
    """Raise ValueError for keyword arguments that an operation does not accept."""
    unknown = sorted(set(options) - op.option_names)
    if unknown:
        accepted = ", ".join(sorted(op.option_names)) or "none"
        raise ValueError(
            f"{type(op).__name__} does not accept the keyword argument {unknown[0]!r}; it accepts: {accepted}"
        )


@without_autocast
def forward(
    passes: Sequence[OperationPasses], x: Any, given: Sequence[Given], fuses: bool
) -> tuple[ForwardResults, list[Sequence[Any]]]:
    """Compute the forward pass of consecutive operations.

    Args:
        passes: Their passes.
        x: The input.
        given: Their parameters and extra inputs.
        fuses: Kernels may compute several operations.

    Returns:
        The results, and by operation the values that its backward pass reads.
    """
    if runners:
        return runners[-1]("forward pass of Sequential", _forward, (passes, x, given, fuses))
    return _forward(passes, x, given, fuses)


def _forward(
    passes: Sequence[OperationPasses], x: Any, given: Sequence[Given], fuses: bool
) -> tuple[ForwardResults, list[Sequence[Any]]]:
    value = Value(x)
    offloads = offloading.synchronizer is not None
    if offloads:
        mark_ready(x)
    del x
    saved: list[Sequence[Any]] = [()] * len(passes)
    extra: list[tuple[Value, ...]] = [()] * len(passes)
    computing = [i for i, own in enumerate(passes) if not own.keeps_input]
    at = 0
    while at < len(computing):
        i = computing[at]
        following = computing[at + 1] if fuses and at + 1 < len(computing) else None
        made: ForwardResult | None = None
        if following is not None:
            pattern = FORWARD.get((type(passes[i]), type(passes[following])))
            pair = pattern and pattern(passes[i], passes[following], value, given[i], given[following])
            if pair:
                saved[i], made = pair[0].saved, pair[1]
                at += 1
        if made is None:
            request = None
            if following is not None and passes[i].casts_output:
                request = passes[following].input_request()
            made = passes[i].fused_forward(value, given[i], request)
            saved[i], extra[i] = made.saved, made.extra
        value = made.output
        del made
        if offloads and not passes[i].linears():  # a product marks its operands itself
            for tensor in saved[i]:
                if type(tensor) not in _SHAPES:
                    mark_ready(tensor)
        at += 1
    tensors: dict[int, Any] = {}
    output = _returned(value, tensors)
    return ForwardResults(output, [tuple([_returned(own, tensors) for own in made]) for made in extra]), saved


def _returned(value: Value, tensors: dict[int, Any]) -> Any:
    """The tensor of a result; several results of the same data are one tensor."""
    if torch.compiler.is_compiling():
        return value.result()
    if id(value.data) not in tensors:
        tensors[id(value.data)] = value.result()
    return tensors[id(value.data)]


@without_autocast
def backward(
    passes: Sequence[OperationPasses],
    dy: list[Any],
    saved: list[Sequence[Any]],
    grads: Sequence[Sequence[Any]],
    fuses: bool,
) -> list[Any]:
    """Compute the backward pass of consecutive operations.

    Args:
        passes: Their passes.
        dy: [gradient of the output]. The list is emptied, so that the gradient is freed after its last reader.
        saved: By operation the values that its forward pass saved. The list is emptied.
        grads: Gradients of the extra outputs by operation; None for an absent one.
        fuses: Kernels may compute several operations.

    Returns:
        [gradient of the input, gradients of the parameters by operation, gradients of the extra inputs by operation].
    """
    if runners:
        return runners[-1]("backward pass of Sequential", _backward, (passes, dy, saved, grads, fuses))
    return _backward(passes, dy, saved, grads, fuses)


def _backward(
    passes: Sequence[OperationPasses],
    dy: list[Any],
    saved: list[Sequence[Any]],
    grads: Sequence[Sequence[Any]],
    fuses: bool,
) -> list[Any]:
    parameters: list[Sequence[Any]] = [own.absent_gradients for own in passes]
    extra: list[Sequence[Value | None]] = [()] * len(passes)
    computing = [i for i, own in enumerate(passes) if not own.keeps_gradient(grads[i])]
    operands, leading = dy, None
    while computing:
        i = computing.pop()
        operands += saved[i]
        saved[i] = ()
        if offloading.used and not passes[i].linears():  # a product waits for each operand before it reads it
            wait_for_saved(*[value for value in operands[1:] if type(value) not in _SHAPES])
        made: BackwardResult | None = None
        if fuses and computing:
            earlier = computing[-1]
            pattern = BACKWARD.get((type(passes[earlier]), type(passes[i])))
            made = pattern and pattern(passes[earlier], passes[i], operands, leading, grads[earlier])  # pyright: ignore
            if made is not None:
                computing.pop()
        if made is None:
            request = _gradient_request(passes, computing) if fuses and passes[i].casts_gradient else None
            made = passes[i].fused_backward(operands, leading, grads[i], request)
        parameters[i], extra[i] = made.parameters, made.extra
        operands = [None]
        if made.grad_input is not None:
            operands, leading = [made.grad_input.data], made.grad_input.leading
        del made
    saved.clear()
    (grad_input,) = operands
    tensors: dict[int, Any] = {}
    dx = None if grad_input is None else _returned(Value(grad_input, leading), tensors)
    of_inputs = [[None if grad is None else _returned(grad, tensors) for grad in own] for own in extra]
    return [dx, parameters, of_inputs]


def _gradient_request(passes: Sequence[OperationPasses], earlier: Sequence[int]) -> ReaderCast | None:
    """The cast that the last of some earlier operations requests of the gradient of its output."""
    if not earlier:
        return None
    before = passes[earlier[-2]].gradient_request(None) if len(earlier) > 1 else None
    return passes[earlier[-1]].gradient_request(before)


def run_forward(
    ops: Sequence[Any],
    ctxs: Sequence[Any],
    x: Any,
    extra_inputs: Sequence[Sequence[Tensor]],
    options: Sequence[dict[str, Any]],
    records: bool | None = None,
) -> tuple[Any, list[tuple[Any, ...]]]:
    """Compute the forward pass of consecutive operations and save what their backward pass reads in their contexts.

    Args:
        ops: Operations of this package.
        ctxs: Their contexts.
        x: The input.
        extra_inputs: Extra inputs by operation.
        options: Keyword arguments by operation.
        records: The chain of which these operations are a part records gradients; None to find out.

    Returns:
        The output, and the extra outputs by operation.
    """
    if records is None:
        records = bool(torch.is_grad_enabled() or ctxs[-1].requires_grad)
    passes, parameters = describe(ops, ctxs, x, extra_inputs, options, records)
    passes = [own.bound(extra) for own, extra in zip(passes, extra_inputs, strict=True)]
    given = [Given(own, extra) for own, extra in zip(parameters, extra_inputs, strict=True)]
    results, saved = forward(passes, x, given, fusion_enabled())
    for ctx, own, values in zip(ctxs, passes, saved, strict=True):
        if ctx.requires_grad:
            _save(ctx, own, values)
    return results.output, results.extra


def _save(ctx: Any, passes: OperationPasses, saved: Sequence[Any]) -> None:
    """Save values in a context: tensors and operands by their tensors, shapes separately."""
    tensors, forms, shapes = pack_saved(saved)
    if torch.compiler.is_compiling():
        # torch 2.13 cannot save a tensor of a traced function that shares memory with another one of its tensors.
        tensors = [
            tensor.clone() if type(tensor) is Tensor or type(tensor) is torch.nn.Parameter else tensor
            for tensor in tensors
        ]
    ctx.save_for_backward(*tensors)
    ctx.pass_state = PassState(passes, forms, shapes)


def pack_saved(saved: Sequence[Any]) -> tuple[list[Any], list[Any], dict[int, Any]]:
    """Tensors of saved values, the forms of operands, and {place: shape} of values that are shapes."""
    shapes = {i: value for i, value in enumerate(saved) if type(value) in _SHAPES}
    tensors, forms = pack(*[None if i in shapes else value for i, value in enumerate(saved)])
    return tensors, forms, shapes


def unpack_saved(tensors: Sequence[Any], forms: list[Any], shapes: dict[int, Any]) -> list[Any]:
    """The saved values that `pack_saved` took apart."""
    values = unpack(tensors, forms)
    for i, shape in shapes.items():
        values[i] = shape
    return values


def run_backward(
    ctxs: Sequence[Any], grad_output: Any, grad_extra_outputs: Sequence[Sequence[Tensor | None]]
) -> tuple[Any, list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Compute the backward pass of operations from the contexts of `run_forward`.

    Args:
        ctxs: Their contexts.
        grad_output: Gradient of the last operation's output.
        grad_extra_outputs: Gradients of the extra outputs by operation.

    Returns:
        The gradient of the input, and by operation the gradients of the parameters and of the extra inputs.

    Raises:
        RuntimeError: A context has no saved state.
    """
    saved: list[Sequence[Any]] = []
    for ctx in ctxs:
        if not hasattr(ctx, "pass_state"):
            raise RuntimeError(
                "fuser_backward needs the state that fuser_forward of the same operation saves, and this context has "
                "none; call fuser_forward of the basic operations with their contexts in the forward pass"
            )
        saved.append(unpack_saved(ctx.saved_tensors, ctx.pass_state.forms, ctx.pass_state.shapes))
        ctx.saved_tensors = None
    dy = [grad_output]
    del grad_output
    passes = [ctx.pass_state.passes for ctx in ctxs]
    grad_input, parameters, extra = backward(passes, dy, saved, grad_extra_outputs, fusion_enabled())
    return grad_input, list(map(tuple, parameters)), list(map(tuple, extra))
