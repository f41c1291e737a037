"""Run consecutive operations as one forward pass and one backward pass, built of their contributions and fused.

A pass is built once per kind of call, which is the tuple of the operations' contributions. The rules of
`common/passes/rules.py` merge steps of neighbouring operations; `functions/run.py` executes the result. Operations that
run alone go through the same functions, so the passes of a chain are compared with those of its operations one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common.memory import Memory
from ...common.passes.rules import (
    ACCUMULATED_PRODUCT,
    BIAS_IN_PRODUCT,
    CODES_AND_SUMS_FROM_PRODUCER,
    CODES_BESIDE_SUMS,
    CODES_FROM_PRODUCER,
    SUM_IN_NORM_BACKWARD,
    fuse,
    without_identity_casts,
)
from ...common.passes.step import Pass, Step
from ...common.passes.vocabulary import Cast, ColumnSum
from ..functions.run import Schedule, run, schedule_of
from ..functions.saving import pack, unpack
from ..quantization.autocast import AutocastState, current
from ..runtime.device import autocast_dtype
from ..tensor.quantized_tensor import QuantizedTensorStorage
from .pass_builder import Backward, ChainEnvironment, Contribution, Forward, PassBuilder, Value
from .step_functions import TABLE

RULES = (
    BIAS_IN_PRODUCT,
    CODES_BESIDE_SUMS,
    CODES_AND_SUMS_FROM_PRODUCER,
    CODES_FROM_PRODUCER,
    ACCUMULATED_PRODUCT,
    SUM_IN_NORM_BACKWARD,
)
# Steps whose result is contiguous, so that `dense` leaves it unchanged.
_DENSE = frozenset({"dense", "activation_backward", "norm_backward", "product", "situ_glu_backward"})
_KEPT = 512
assert set(TABLE) >= {"rows", "unflatten"}, "the executor has the functions of these passes"


class TensorFacts(NamedTuple):
    """What an operation's contribution may depend on of its input."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    quantized: bool = False

    @staticmethod
    def of(x: Any) -> TensorFacts:
        """Return the facts of a tensor, plain or quantized."""
        return TensorFacts(tuple(x.shape), x.dtype, x.device, isinstance(x, QuantizedTensorStorage))


@dataclass(slots=True)
class Call:
    """What a contribution may depend on beside the input and the operation.

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
    extra: tuple[TensorFacts, ...]
    extra_tensors: tuple[Tensor, ...]
    options: dict[str, Any]


class Member(NamedTuple):
    """One operation of a pass: its name in the pass, contribution, parameters, numbers of extra tensors, and whether
    it saves anything."""

    name: str
    contribution: Contribution
    parameters: tuple[str, ...]
    extra_inputs: int
    saves: bool


class ForwardPlan(NamedTuple):
    """A forward pass, the numbers of extra outputs, and for each operation its saved buffers: (name, kept name)."""

    schedule: Schedule
    extra_outputs: tuple[int, ...]
    saved: tuple[tuple[tuple[str | None, str | None], ...], ...]
    steps: Pass


class StepState(NamedTuple):
    """What the forward pass of an operation leaves in its context beside tensors."""

    environment: ChainEnvironment
    member: Member
    saved: tuple[tuple[str | None, str | None], ...]
    forms: list[Any]
    constants: dict[int, Any]


class GradFacts(NamedTuple):
    """Whether the gradient of an extra output is there, and may be written in place."""

    writable: bool


class BackwardKey(NamedTuple):
    """A kind of backward pass, by operation: members, saved buffers, and gradients of the extra outputs."""

    members: tuple[Member, ...]
    saved: tuple[tuple[tuple[str | None, str | None], ...], ...]
    extra: tuple[tuple[GradFacts | None, ...], ...]
    quantized: bool


class BackwardPlan(NamedTuple):
    """A backward pass, and the numbers of gradients of parameters and of extra inputs by operation."""

    schedule: Schedule
    parameters: tuple[int, ...]
    extra_inputs: tuple[int, ...]
    steps: Pass


class _Unfused:
    """Whether passes are built without rules, which tests compare with."""

    blocks = 0


@contextmanager
def unfused() -> Any:
    """Build passes without fusing their steps inside of the block."""
    _Unfused.blocks += 1
    try:
        yield
    finally:
        _Unfused.blocks -= 1


def _allowed(members: dict[str, Contribution]) -> Callable[[str, Step, Step], bool]:
    """Return the predicate by which rules apply: the operation that reads codes decides."""

    def allowed(rule: str, producer: Step, reader: Step) -> bool:
        settings: Any = reader.settings
        sums = rule in (CODES_AND_SUMS_FROM_PRODUCER.name, CODES_BESIDE_SUMS.name)
        if rule == CODES_BESIDE_SUMS.name:
            settings = producer.settings if reader.op == "column_sum" else reader.settings
        cast = settings.cast if isinstance(settings, ColumnSum) else settings
        if rule in (CODES_FROM_PRODUCER.name, CODES_AND_SUMS_FROM_PRODUCER.name, CODES_BESIDE_SUMS.name):
            if not isinstance(cast, Cast):
                return False
            return members[_operation(cast.layer)].takes_codes(cast.tensor, producer, sums)
        return True

    return allowed


def _operation(layer: str) -> str:
    return layer.partition(".")[0]


def _plan_forward(key: tuple[tuple[Member, ...], bool, bool]) -> ForwardPlan:
    members, quantized, fused = key
    x = f"{members[0].name}.x"
    steps, value = PassBuilder(), Value(x, None, quantized)
    inputs, parts = [x], []
    for member in members:
        inputs += [f"{member.name}.{parameter}" for parameter in member.parameters]
        inputs += [f"{member.name}.extra{i}" for i in range(member.extra_inputs)]
        part: Forward = member.contribution.forward(steps, member.name, value)
        value = part.output
        parts.append(part if member.saves else part._replace(saved=()))
    output = value.name if value.quantized else steps.shaped(value).name
    extra = [steps.shaped(made).name for part in parts for made in part.extra_outputs]
    saved = tuple([name for part in parts for name in part.saved])
    contributions = {member.name: member.contribution for member in members}
    made = Pass(tuple(inputs), (output, *extra), saved, tuple(steps.steps))
    read = without_identity_casts(made, _is_plain(contributions))
    if fused:
        read = fuse(read, _allowed(contributions), RULES)
    pairs = iter(zip(saved, read.saved, strict=True))
    return ForwardPlan(
        schedule_of(read),
        tuple([len(part.extra_outputs) for part in parts]),
        tuple([tuple([next(pairs) for _ in part.saved]) for part in parts]),
        read,
    )


def _is_plain(contributions: dict[str, Contribution]) -> Callable[[Cast], bool]:
    return lambda cast: contributions[_operation(cast.layer)].is_plain(cast.layer)


def _plan_backward(key: tuple[BackwardKey, bool]) -> BackwardPlan:
    (members, saved, extra, quantized), fused = key
    steps, value = PassBuilder(".backward"), Value("dy", None, quantized)
    parts: list[Backward] = []
    inputs = ["dy"]
    columns: list[Step] = []
    for member, kept, given in reversed(list(zip(members, saved, extra, strict=True))):
        grads = []
        for i, facts in enumerate(given):
            grads.append(None if facts is None else Value(f"{member.name}.grad_extra{i}"))
            inputs += [] if facts is None else [f"{member.name}.grad_extra{i}"]
        names = tuple([name for name, _ in kept])
        writable = tuple([facts is not None and facts.writable for facts in given])
        contribution = member.contribution.with_writable_gradients(writable)
        part = contribution.backward(steps, member.name, value, names, tuple(grads))
        parts.insert(0, part)
        for name, source in kept:
            if source is not None and source not in inputs:
                inputs.append(source)
            # A plain layer saves the matrix itself and reads it by columns here.
            if name is not None and source is not None and name != source:
                columns.append(Step("cast", (source,), (None, name), Cast(member.name, "", False, True)))
        if part.grad_input is not None:
            value = part.grad_input
    first = parts[0].grad_input
    grad_input = None if first is None else first.name if first.quantized else steps.shaped(first).name
    parameters = [name for part in parts for name in part.grad_parameters]
    extras = [
        None if made is None else steps.shaped(made).name for part in parts for made in part.grad_extra_inputs
    ]
    made_pass = Pass(tuple(inputs), (grad_input, *parameters, *extras), (), (*_unique(columns), *steps.steps))
    contributions = {member.name: member.contribution for member in members}
    read = _without_dense(without_identity_casts(made_pass, _is_plain_or_column(contributions)))
    if fused:
        read = fuse(read, _allowed(contributions), RULES)
    return BackwardPlan(
        schedule_of(read),
        tuple([len(part.grad_parameters) for part in parts]),
        tuple([len(part.grad_extra_inputs) for part in parts]),
        read,
    )


def _unique(columns: list[Step]) -> list[Step]:
    return list({step.results: step for step in columns}.values())


def _is_plain_or_column(contributions: dict[str, Contribution]) -> Callable[[Cast], bool]:
    plain = _is_plain(contributions)
    return lambda cast: not cast.tensor or plain(cast)


def _without_dense(pass_: Pass) -> Pass:
    """Remove `dense` steps that read a contiguous matrix of this pass."""
    made = {name: step.op for step in pass_.steps for name in step.makes()}
    names: dict[str | None, str | None] = {}
    steps: list[Step] = []
    for step in pass_.steps:
        step = replace(step, inputs=tuple([names.get(name, name) for name in step.inputs]))
        if step.op == "dense" and made.get(step.inputs[0] or "") in _DENSE:
            names[step.results[0]] = step.inputs[0]
        else:
            steps.append(step)
    return Pass(
        pass_.inputs, tuple([names.get(name, name) for name in pass_.results]), pass_.saved, tuple(steps)
    )


_forward_plans: Memory[Any, ForwardPlan] = Memory(_plan_forward, _KEPT)
_backward_plans: Memory[Any, BackwardPlan] = Memory(_plan_backward, _KEPT)


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
    environment = ChainEnvironment() if environment is None else environment
    facts, state = TensorFacts.of(x), current()
    members: list[Member] = []
    given: list[Any] = [x]
    traced, narrowed = torch.compiler.is_compiling(), autocast_dtype(x.device.type)
    for i, (op, ctx) in enumerate(zip(ops, ctxs, strict=True)):
        extra = tuple([TensorFacts.of(tensor) for tensor in extra_inputs[i]])
        call = Call(
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
        names = tuple(parameters)
        members.append(Member(str(first + i), contribution, names, len(extra), ctx.requires_grad))
        given += [*parameters.values(), *extra_inputs[i]]
    plan = _forward_plans[(tuple(members), isinstance(x, QuantizedTensorStorage), not _Unfused.blocks)]
    (output, *extra_outputs), saved = run(plan.schedule, environment, given)  # pyright: ignore
    at = 0
    for ctx, member, pairs in zip(ctxs, members, plan.saved, strict=True):
        if ctx.requires_grad:
            _save(ctx, environment, member, pairs, saved[at : at + len(pairs)])
        at += len(pairs)
    made = iter(extra_outputs)
    return output, [tuple([next(made) for _ in range(count)]) for count in plan.extra_outputs]


def check_options(op: Any, options: dict[str, Any]) -> None:
    """Raise ValueError for keyword arguments that an operation does not accept."""
    unknown = sorted(set(options) - op.option_names)
    if unknown:
        accepted = ", ".join(sorted(op.option_names)) or "none"
        raise ValueError(
            f"{type(op).__name__} does not accept the keyword argument {unknown[0]!r}; it accepts: {accepted}"
        )


def _save(ctx: Any, env: ChainEnvironment, member: Member, pairs: Any, saved: list[Any]) -> None:
    """Keep saved buffers in a context: tensors and operands by their tensors, shapes beside them."""
    constants = {i: value for i, value in enumerate(saved) if type(value) in (tuple, torch.Size)}
    tensors, forms = pack(*[None if i in constants else value for i, value in enumerate(saved)])
    ctx.save_for_backward(*tensors)
    ctx.step_state = StepState(env, member, pairs, forms, constants)


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
    facts = tuple([tuple([_grad_facts(grad) for grad in grads]) for grads in grad_extra_outputs])
    quantized = isinstance(grad_output, QuantizedTensorStorage)
    members, pairs = tuple([s.member for s in states]), tuple([s.saved for s in states])
    plan = _backward_plans[(BackwardKey(members, pairs, facts, quantized), not _Unfused.blocks)]
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


def _grad_facts(grad: Tensor | None) -> GradFacts | None:
    if grad is None:
        return None
    # Autograd may pass an expanded gradient, whose elements share memory.
    return GradFacts(not isinstance(grad, QuantizedTensorStorage) and grad.is_contiguous())
