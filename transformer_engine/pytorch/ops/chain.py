"""Run consecutive operations as one forward pass and one backward pass, built of their contributions and fused.

A pass is built once per kind of call, which is the tuple of the operations' contributions. The rules of
`common/passes/rules.py` merge steps of neighbouring operations; `functions/run.py` executes the result. Operations that
run alone go through the same functions, so the passes of a chain are compared with those of its operations one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..functions.normalization import Norm
from ..functions.run import run
from ..functions.saving import pack, unpack
from ..primitives.activation import ActivationParams
from ..quantization.autocast import AutocastState, current
from ..runtime.device import autocast_dtype
from ..tensor.quantized_tensor import QuantizedTensorStorage
from . import step_functions as step_functions  # the executor finds their functions in its table
from .chain_plans import (
    BackwardKey,
    BackwardPlan,
    GradFacts,
    PassMember,
    backward_plan,
    forward_plan,
    traced_plans,
)


class InputFacts(NamedTuple):
    """Metadata of an operation's input, on which its contribution may depend."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    quantized: bool = False
    subclass: bool = False

    @staticmethod
    def of(x: Any) -> InputFacts:
        """Return the facts of a tensor: plain, quantized, or of another subclass."""
        quantized = isinstance(x, QuantizedTensorStorage)
        subclass = not quantized and type(x) not in (Tensor, torch.nn.Parameter)
        return InputFacts(tuple(x.shape), x.dtype, x.device, quantized, subclass)


@dataclass(slots=True)
class ChainEnvironment:
    """The objects that settings of steps refer to by the name of an operation; see `functions.steps.Environment`.

    Attributes:
        linears: Specs of linear layers, and boundaries of collectives.
        dtypes: Dtypes of the gradients of weight and bias.
        norms: Normalizations.
        activations: Names and parameters of activations.
        objects: Everything else, by operation and slot: quantizers, dropout probabilities.
        leading: Unused; results keep their dimensions in buffers.
        of_call: Operations whose entry of `linears` depends on values of their first extra input: the function from
            that tensor to the entry. A prepared chain calls it in every call.
        records: Gradients are recorded, so that a later reader of a result may need it in the backward pass.
    """

    linears: dict[str, Any] = field(default_factory=dict)
    dtypes: dict[str, tuple[torch.dtype, torch.dtype]] = field(default_factory=dict)
    norms: dict[str, Norm] = field(default_factory=dict)
    activations: dict[str, tuple[str, ActivationParams]] = field(default_factory=dict)
    objects: dict[tuple[str, str], Any] = field(default_factory=dict)
    leading: tuple[int, ...] = ()
    of_call: dict[str, Callable[[Tensor], Any]] = field(default_factory=dict)
    records: bool = False


@dataclass(slots=True)
class OperationCall:
    """Facts of a call on which a contribution may depend, in addition to the input and the operation.

    Attributes:
        state: The autocast state.
        autocast: Dtype of torch.autocast where it is active, else None.
        traced: A compiler is tracing.
        saves: A backward pass will reach the operation.
        grad_input: The gradient of the operation's input is needed.
        extra: Facts of the operation's extra inputs.
        extra_tensors: The extra inputs.
        options: Keyword arguments of the operation.
    """

    state: AutocastState
    autocast: torch.dtype | None
    traced: bool
    saves: bool
    grad_input: bool
    extra: tuple[InputFacts, ...]
    extra_tensors: tuple[Tensor, ...]
    options: dict[str, Any]


class StepState(NamedTuple):
    """Non-tensor state that the forward pass of an operation leaves in its context."""

    environment: ChainEnvironment
    member: PassMember
    saved: tuple[tuple[str | None, str | None], ...]
    forms: list[Any]
    constants: dict[int, Any]
    traced_plan: BackwardPlan | None = None


class _Unfused:
    """Whether passes are built without rules, which tests compare with."""

    blocks = 0


def rules_apply() -> bool:
    """Return whether rules merge the steps of passes, which is so outside of `unfused` blocks."""
    return not _Unfused.blocks


@contextmanager
def unfused() -> Any:
    """Build passes without fusing their steps inside of the block."""
    _Unfused.blocks += 1
    try:
        yield
    finally:
        _Unfused.blocks -= 1


def run_forward(
    ops: Sequence[Any],
    ctxs: Sequence[Any],
    x: Any,
    extra_inputs: Sequence[Sequence[Tensor]],
    options: Sequence[dict[str, Any]],
    environment: ChainEnvironment | None = None,
    first: int = 0,
) -> tuple[Any, list[tuple[Any, ...]]]:
    """Run the forward pass of consecutive operations.

    Args:
        ops: Operations that contribute steps.
        ctxs: Their contexts.
        x: The input.
        extra_inputs: Extra inputs by operation.
        options: Keyword arguments by operation.
        environment: Environment of the whole chain, of which these operations are a part; None for a new one.
        first: Index of the first operation in the chain.

    Returns:
        The output, and the extra outputs by operation.
    """
    if environment is None:
        environment = ChainEnvironment(records=torch.is_grad_enabled() or ctxs[-1].requires_grad)
    members, parameters = describe(ops, ctxs, x, extra_inputs, options, environment, first)
    given: list[Any] = [x]
    for tensors, extra in zip(parameters, extra_inputs, strict=True):
        given += [*tensors, *extra]
    quantized, traced_plan = isinstance(x, QuantizedTensorStorage), None
    if torch.compiler.is_compiling():
        plan, traced_plan = traced_plans(members, quantized, rules_apply())
    else:
        plan = forward_plan(members, quantized, rules_apply())
    (output, *extra_outputs), saved = run(plan.schedule, environment, given)  # pyright: ignore
    at = 0
    for ctx, member, pairs in zip(ctxs, members, plan.saved, strict=True):
        if ctx.requires_grad:
            _save(ctx, environment, member, pairs, saved[at : at + len(pairs)], traced_plan)
        at += len(pairs)
    made = iter(extra_outputs)
    return output, [tuple([next(made) for _ in range(count)]) for count in plan.extra_outputs]


def describe(
    ops: Sequence[Any],
    ctxs: Sequence[Any],
    x: Any,
    extra_inputs: Sequence[Sequence[Tensor]],
    options: Sequence[dict[str, Any]],
    environment: ChainEnvironment,
    first: int = 0,
) -> tuple[tuple[PassMember, ...], list[list[Tensor]]]:
    """Collect the descriptions of operations for one call; see `run_forward`.

    Returns:
        The members of the passes, and by operation the parameters that its steps read.
    """
    facts, state = InputFacts.of(x), current()
    members: list[PassMember] = []
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
            extra,
            tuple(extra_inputs[i]),
            options[i],
        )
        check_options(op, options[i])
        contribution, facts = op.contribute(str(first + i), facts, call, environment)
        parameters = op.pass_parameters()
        tensors.append(list(parameters.values()))
        members.append(
            PassMember(str(first + i), contribution, tuple(parameters), len(extra), ctx.requires_grad)
        )
    return tuple(members), tensors


def check_options(op: Any, options: dict[str, Any]) -> None:
    """Raise ValueError for keyword arguments that an operation does not accept."""
    unknown = sorted(set(options) - op.option_names)
    if unknown:
        accepted = ", ".join(sorted(op.option_names)) or "none"
        raise ValueError(
            f"{type(op).__name__} does not accept the keyword argument {unknown[0]!r}; it accepts: {accepted}"
        )


def _save(
    ctx: Any,
    env: ChainEnvironment,
    member: PassMember,
    pairs: Any,
    saved: list[Any],
    traced_plan: BackwardPlan | None,
) -> None:
    """Keep saved buffers in a context: tensors and operands by their tensors, shapes separately."""
    constants = {i: value for i, value in enumerate(saved) if type(value) in (tuple, torch.Size)}
    tensors, forms = pack(*[None if i in constants else value for i, value in enumerate(saved)])
    if traced_plan is not None:
        # torch 2.13 cannot save a tensor of a traced function that shares memory with another one of its tensors.
        tensors = [
            tensor.clone() if type(tensor) is Tensor or type(tensor) is torch.nn.Parameter else tensor
            for tensor in tensors
        ]
    ctx.save_for_backward(*tensors)
    ctx.step_state = StepState(env, member, pairs, forms, constants, traced_plan)


def _saved_values(ctx: Any) -> list[Any]:
    state: StepState = ctx.step_state
    values = unpack(ctx.saved_tensors, state.forms)
    for i, constant in state.constants.items():
        values[i] = constant
    ctx.saved_tensors = None
    return values


def run_backward(
    ctxs: Sequence[Any], grad_output: Any, grad_extra_outputs: Sequence[Sequence[Tensor | None]]
) -> tuple[Any, list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Run the backward pass of operations whose forward pass ran in one environment.

    Args:
        ctxs: Their contexts.
        grad_output: Gradient of the last operation's output.
        grad_extra_outputs: Gradients of the extra outputs by operation.

    Returns:
        The gradient of the input, and by operation the gradients of the parameters and of the extra inputs.
    """
    states: list[StepState] = [ctx.step_state for ctx in ctxs]
    environment = states[0].environment
    plan = states[0].traced_plan
    if plan is None:
        facts = tuple([tuple([grad_facts(grad) for grad in grads]) for grads in grad_extra_outputs])
        quantized = isinstance(grad_output, QuantizedTensorStorage)
        members, pairs = tuple([s.member for s in states]), tuple([s.saved for s in states])
        plan = backward_plan(BackwardKey(members, pairs, facts, quantized), rules_apply())
    buffers: dict[str, Any] = {"dy": grad_output}
    for ctx, state, grads in zip(ctxs, states, grad_extra_outputs, strict=True):
        for (_, source), value in zip(state.saved, _saved_values(ctx), strict=True):
            if source is not None:
                buffers[source] = value
        for i, grad in enumerate(grads):
            if grad is not None:
                buffers[f"{state.member.name}.grad_extra{i}"] = grad
    given = [buffers.pop(name) for name in plan.steps.inputs]
    del grad_output
    (grad_input, *grads), _ = run(plan.schedule, environment, given)  # pyright: ignore
    made = iter(grads)
    parameters = [tuple([next(made) for _ in range(count)]) for count in plan.parameters]
    return grad_input, parameters, [tuple([next(made) for _ in range(n)]) for n in plan.extra_inputs]


def grad_facts(grad: Tensor | None) -> GradFacts | None:
    """Return the facts of the gradient of an extra output; None if it is absent."""
    if grad is None:
        return None
    return GradFacts(isinstance(grad, QuantizedTensorStorage))
