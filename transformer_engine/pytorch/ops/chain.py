"""Run consecutive operations as one forward and one backward pass, with fused kernels where they exist.

An `OperationPasses` holds the forward and the backward function of one operation for one kind of call. `forward` and
`backward` call these functions one after another. What fuses is decided in four steps, the last two in this file:

1. `Sequential._find_parts` collects consecutive operations. Other modules end a chain, and operations with hooks, with
   `compile()` or with a replaced `forward` are called alone (`intercepted_calls.py`; `te.explain` prints
   `unfused_reason`).
2. A chain with operations of users runs in segments between them (`fuser.py`, `chain_run.py`).
3. Two neighbors in `FORWARD_PAIRS` or `BACKWARD_PAIRS` (`passes/patterns.py`) are computed together, unless the
   function of the pair returns None for this call.
4. Otherwise the reader, which is the next operation in the direction of the pass, may request a cast
   (`input_request`, `gradient_request`). Linear products do under a recipe, unless `input_cast` or `gradient_cast`
   (`functions/linear_operands.py`) returns None. The producer quantizes its result if its kernel can: `casts_output`
   of norms (`passes/normalization.py`) and activations (`passes/activation.py`), `casts_gradient` of activations and
   bias gradients (`passes/bias.py`). Products (`passes/linear.py`) and all others return high precision. The reader
   then quantizes its operand itself (`functions/linear.py`).
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
from ..runtime.autograd import disable_autocast
from ..runtime.device import autocast_dtype
from .passes.contract import (
    BackwardResult,
    InputFacts,
    OperationCall,
    OperationPasses,
    OpTensors,
    ReaderCast,
    Value,
)
from .passes.patterns import BACKWARD_PAIRS, FORWARD_PAIRS


class PassState(NamedTuple):
    """State that the forward pass of an operation stores in its context in addition to tensors.

    Attributes:
        passes: The passes of the operation in this call.
        forms: Non-tensor parts of the saved operands (`saving.pack`).
    """

    passes: OperationPasses
    forms: list[Any]


_unfused_blocks = 0  # open `unfused` block count


def fusion_enabled() -> bool:
    """Whether fusion is enabled, i.e. no `unfused` block is open."""
    return _unfused_blocks == 0


@contextmanager
def unfused() -> Iterator[None]:
    """Run each operation by its own kernels inside the block; tests compare fused chains with this."""
    global _unfused_blocks
    _unfused_blocks += 1
    try:
        yield
    finally:
        _unfused_blocks -= 1


def build_passes(
    ops: Sequence[Any],
    ctxs: Sequence[Any],
    x: Any,
    records: bool,
    extra_inputs: Sequence[Sequence[Tensor]],
    options: Sequence[dict[str, Any]],
) -> tuple[list[OperationPasses], list[list[Tensor]]]:
    """Build the `OperationPasses` for operations, and list their parameters. Arguments as in `run_forward`."""
    facts = InputFacts.of(x)
    state = current()
    passes: list[OperationPasses] = []
    parameters: list[list[Tensor]] = []
    traced = torch.compiler.is_compiling()
    dtype_of_autocast = autocast_dtype(x.device.type)
    for i, (op, ctx) in enumerate(zip(ops, ctxs, strict=True)):
        check_options(op, options[i])
        call = OperationCall(
            state=state,
            autocast=dtype_of_autocast,
            traced=traced,
            saves=ctx.requires_grad,
            grad_input=ctx.input_requires_grad,
            records=records,
            extra=tuple([InputFacts.of(tensor) for tensor in extra_inputs[i]]),
            extra_tensors=tuple(extra_inputs[i]),
            options=options[i],
        )
        ctx._input_shapes = (facts.shape, *[extra.shape for extra in call.extra])
        op_passes, facts = op.passes(facts, call)
        passes.append(op_passes)
        parameters.append(op.pass_parameters())
    return passes, parameters


def check_options(op: Any, options: dict[str, Any]) -> None:
    """Raise ValueError for keyword arguments that an operation does not accept."""
    unknown = sorted(set(options) - op.option_names)
    if unknown:
        accepted = ", ".join(sorted(op.option_names)) or "none"
        raise ValueError(
            f"{type(op).__name__} does not accept the keyword argument {unknown[0]!r}; it accepts: {accepted}"
        )


@disable_autocast
def forward(
    passes: Sequence[OperationPasses], x: Any, tensors: Sequence[OpTensors], fuse: bool
) -> tuple[Any, list[tuple[Any, ...]], list[Sequence[Any]]]:
    """Compute the forward pass through consecutive operations.

    Args:
        passes: Their passes.
        x: The input.
        tensors: Their parameters and extra inputs.
        fuse: Kernels may compute several operations.

    Returns:
        The main output, and by operation the extra outputs and the values that its backward pass reads.
    """
    if runners:
        return runners[-1]("forward pass of Sequential", _forward, (passes, x, tensors, fuse), 2)
    return _forward(passes, x, tensors, fuse)


def _forward(
    passes: Sequence[OperationPasses], x: Any, tensors: Sequence[OpTensors], fuse: bool
) -> tuple[Any, list[tuple[Any, ...]], list[Sequence[Any]]]:
    value = Value(x)
    offloads = offloading.synchronizer is not None
    if offloads:
        mark_ready(x)
    del x
    saved: list[Sequence[Any]] = [()] * len(passes)
    extra: list[tuple[Value, ...]] = [()] * len(passes)
    remaining = [i for i in reversed(range(len(passes))) if not passes[i].is_identity]
    while remaining:
        i = remaining.pop()
        # the next operation, which reads the result
        reader = remaining[-1] if fuse and remaining else None
        pair = None
        if reader is not None:
            compute_pair = FORWARD_PAIRS.get((type(passes[i]), type(passes[reader])))
            if compute_pair is not None:
                pair = compute_pair(passes[i], passes[reader], value, tensors[i], tensors[reader])
        if pair is not None:
            remaining.pop()
            first, second = pair
            saved[i], value = first.saved, second.output
            del first, second, pair
        else:
            request = None
            if reader is not None and passes[i].casts_output:
                request = passes[reader].input_request()
            result = passes[i].fused_forward(value, tensors[i], request)
            saved[i], extra[i], value = result.saved, result.extra, result.output
            del result
        if offloads and not passes[i].linears():  # a product marks its operands itself
            for tensor in saved[i]:
                mark_ready(tensor)
    returned: dict[int, Any] = {}
    output = _return_value(value, returned)
    extra_outputs = [
        tuple([_return_value(output, returned) for output in op_outputs]) for op_outputs in extra
    ]
    return output, extra_outputs, saved


def _return_value(value: Value, tensors: dict[int, Any]) -> Any:
    """Convert a `Value` to the tensor to return; Values that share data return the same object."""
    if torch.compiler.is_compiling():
        return value.result()
    if id(value.data) not in tensors:
        tensors[id(value.data)] = value.result()
    return tensors[id(value.data)]


@disable_autocast
def backward(
    passes: Sequence[OperationPasses],
    dy: list[Any],
    saved: list[Sequence[Any]],
    grads: Sequence[Sequence[Any]],
    fuse: bool,
) -> tuple[Any, list[Sequence[Any]], list[list[Any]]]:
    """Compute the backward pass through consecutive operations.

    Args:
        passes: Their passes.
        dy: [output gradient]. The list is emptied, so that the gradient is freed after its last reader.
        saved: By operation the values that its forward pass saved. The list is emptied.
        grads: Extra output gradients by operation; None for an absent one.
        fuse: Kernels may compute several operations.

    Returns:
        The input gradient, or None if it is not needed; by operation the parameter gradients, and the extra input
        gradients, None for an absent one.
    """
    if runners:
        return runners[-1](
            "backward pass of Sequential", _backward, (passes, dy, saved, grads, fuse), None
        )
    return _backward(passes, dy, saved, grads, fuse)


def _backward(
    passes: Sequence[OperationPasses],
    dy: list[Any],
    saved: list[Any],
    grads: Sequence[Any],
    fuse: bool,
) -> tuple[Any, list[Sequence[Any]], list[list[Any]]]:
    parameters: list[Sequence[Any]] = [operation.absent_gradients for operation in passes]
    extra: list[Sequence[Value | None]] = [()] * len(passes)
    remaining = [
        i for i, operation in enumerate(passes) if not operation.gradient_is_unchanged(grads[i])
    ]
    operands = dy
    leading = None
    while remaining:
        i = remaining.pop()
        operands += saved[i]
        saved[i] = ()
        # a product waits for each operand before it reads it
        if offloading.used and not passes[i].linears():
            wait_for_saved(*operands[1:])
        result: BackwardResult | None = None
        if fuse and remaining:
            earlier = remaining[-1]
            compute_pair = BACKWARD_PAIRS.get((type(passes[earlier]), type(passes[i])))
            if compute_pair is not None:
                result = compute_pair(passes[earlier], passes[i], operands, leading, grads[earlier])
            if result is not None:
                remaining.pop()
        if result is None:
            request = (
                _gradient_request(passes, remaining) if fuse and passes[i].casts_gradient else None
            )
            result = passes[i].fused_backward(operands, leading, grads[i], request)
        parameters[i], extra[i] = result.parameters, result.extra
        operands = [None]
        if result.grad_input is not None:
            operands, leading = [result.grad_input.data], result.grad_input.leading
        del result
    saved.clear()
    (grad_input,) = operands
    returned: dict[int, Any] = {}
    dx = None if grad_input is None else _return_value(Value(grad_input, leading), returned)
    extra_inputs = [
        [None if grad is None else _return_value(grad, returned) for grad in op_grads]
        for op_grads in extra
    ]
    return dx, parameters, extra_inputs


def _gradient_request(
    passes: Sequence[OperationPasses], earlier: Sequence[int]
) -> ReaderCast | None:
    """Return the cast that the previous operation requests for its output gradient.

    Args:
        passes: The passes of the chain.
        earlier: Indices of the operations whose backward pass follows; the last one is the previous operation.
    """
    if not earlier:
        return None
    request_before = passes[earlier[-2]].gradient_request(None) if len(earlier) > 1 else None
    return passes[earlier[-1]].gradient_request(request_before)


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
        ops: This package's operations.
        ctxs: Their contexts.
        x: The input.
        extra_inputs: Extra inputs by operation.
        options: Keyword arguments by operation.
        records: Whether the whole chain records gradients; None: detect.

    Returns:
        The output, and the extra outputs by operation.
    """
    if records is None:
        records = bool(torch.is_grad_enabled() or ctxs[-1].requires_grad)
    passes, parameters = build_passes(ops, ctxs, x, records, extra_inputs, options)
    passes = [operation.bound(extra) for operation, extra in zip(passes, extra_inputs, strict=True)]
    tensors = [OpTensors(*pair) for pair in zip(parameters, extra_inputs, strict=True)]
    output, extra, saved = forward(passes, x, tensors, fusion_enabled())
    for ctx, operation, values in zip(ctxs, passes, saved, strict=True):
        if ctx.requires_grad:
            _save(ctx, operation, values)
    return output, extra


def _save(ctx: Any, passes: OperationPasses, saved: Sequence[Any]) -> None:
    """Save values in a context: tensors by `save_for_backward`, forms in `pass_state`."""
    tensors, forms = pack(*saved)
    ctx.save_for_backward(*copy_in_traces(tensors))
    ctx.pass_state = PassState(passes, forms)


def copy_in_traces(tensors: Sequence[Any]) -> Sequence[Any]:
    """Clone tensors to save in a traced function; elsewhere return them.

    torch 2.13 cannot save a tensor of a traced function that shares memory with another one of its tensors.
    """
    if not torch.compiler.is_compiling():
        return tensors
    return [
        tensor.clone() if type(tensor) is Tensor or type(tensor) is torch.nn.Parameter else tensor
        for tensor in tensors
    ]


def run_backward(
    ctxs: Sequence[Any], grad_output: Any, grad_extra_outputs: Sequence[Sequence[Tensor | None]]
) -> tuple[Any, list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Compute the backward pass through operations from the contexts of `run_forward`.

    Args:
        ctxs: Their contexts.
        grad_output: The last operation's output gradient.
        grad_extra_outputs: Extra output gradients by operation.

    Returns:
        The input gradient, and by operation the parameter and extra input gradients.

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
        saved.append(unpack(ctx.saved_tensors, ctx.pass_state.forms))
        ctx.saved_tensors = None
    dy = [grad_output]
    del grad_output
    passes = [ctx.pass_state.passes for ctx in ctxs]
    grad_input, parameters, extra = backward(
        passes, dy, saved, grad_extra_outputs, fusion_enabled()
    )
    return grad_input, list(map(tuple, parameters)), list(map(tuple, extra))
