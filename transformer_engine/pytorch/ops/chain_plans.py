"""Build the passes of a chain of operations from their contributions, and fuse the steps by rules.

A pass is built once per kind of call, which is the tuple of the operations' contributions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from ...common.memory import Memory
from ...common.passes.groups import over_groups
from ...common.passes.linear import LinearFacts
from ...common.passes.rules import (
    ACCUMULATED_PRODUCT,
    BIAS_IN_PRODUCT,
    CODES_AND_SUMS_FROM_PRODUCER,
    CODES_FROM_PRODUCER,
    CODES_WITH_SUMS,
    GATHERED_PRODUCT,
    SCATTERED_PRODUCT,
    SUM_IN_NORM_BACKWARD,
    fuse,
    without_identity_casts,
)
from ...common.passes.schedule import overlap
from ...common.passes.step import Pass, Step
from ...common.passes.vocabulary import CastSettings, ColumnSum
from ..functions.run import Schedule, schedule_of
from ..runtime.tracing import constant_while_tracing
from .pass_builder import BackwardInputs, BackwardPart, Contribution, ForwardPart, PassBuilder, Value

RULES = (
    BIAS_IN_PRODUCT,
    CODES_WITH_SUMS,
    CODES_AND_SUMS_FROM_PRODUCER,
    CODES_FROM_PRODUCER,
    ACCUMULATED_PRODUCT,
    SUM_IN_NORM_BACKWARD,
    GATHERED_PRODUCT,
    SCATTERED_PRODUCT,
)
# Steps whose result is contiguous, so that `dense` leaves it unchanged.
_DENSE = frozenset({"dense", "activation_backward", "norm_backward", "product", "situ_glu_backward"})
_KEPT = 512


class PassMember(NamedTuple):
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


class GradFacts(NamedTuple):
    """Facts of the gradient of an extra output that is present."""

    quantized: bool


class BackwardKey(NamedTuple):
    """A kind of backward pass, by operation: members, saved buffers, and gradients of the extra outputs."""

    members: tuple[PassMember, ...]
    saved: tuple[tuple[tuple[str | None, str | None], ...], ...]
    extra: tuple[tuple[GradFacts | None, ...], ...]
    quantized: bool


class BackwardPlan(NamedTuple):
    """A backward pass, its numbers of parameter and extra-input gradients per operation, and whether the input's
    gradient may be quantized."""

    schedule: Schedule
    parameters: tuple[int, ...]
    extra_inputs: tuple[int, ...]
    steps: Pass
    quantized: bool


def _allowed(members: dict[str, Contribution]) -> Callable[[str, Step, Step], bool]:
    """Return the predicate by which rules apply: the operation that reads codes decides."""

    def allowed(rule: str, producer: Step, reader: Step) -> bool:
        settings: Any = reader.settings
        sums = rule in (CODES_AND_SUMS_FROM_PRODUCER.name, CODES_WITH_SUMS.name)
        if rule == CODES_WITH_SUMS.name:
            settings = producer.settings if reader.op == "column_sum" else reader.settings
        cast = settings.cast if isinstance(settings, ColumnSum) else settings
        if rule in (CODES_FROM_PRODUCER.name, CODES_AND_SUMS_FROM_PRODUCER.name, CODES_WITH_SUMS.name):
            if not isinstance(cast, CastSettings):
                return False
            return members[_operation(cast.layer)].takes_codes(cast.tensor, producer, sums)
        return True

    return allowed


def _operation(layer: str) -> str:
    return layer.partition(".")[0]


def _plan_forward(key: tuple[tuple[PassMember, ...], bool, bool]) -> ForwardPlan:
    members, quantized, fused = key
    x = f"{members[0].name}.x"
    steps, value = PassBuilder(), Value(x, None, quantized)
    inputs, parts = [x], []
    for member in members:
        inputs += [f"{member.name}.{parameter}" for parameter in member.parameters]
        inputs += [f"{member.name}.extra{i}" for i in range(member.extra_inputs)]
        part: ForwardPart = member.contribution.forward(steps, member.name, value)
        value = part.output
        parts.append(part if member.saves else part._replace(saved=()))
    output = value.name if value.quantized else steps.shaped(value).name
    extra = [steps.shaped(made).name for part in parts for made in part.extra_outputs]
    saved = tuple([name for part in parts for name in part.saved])
    contributions = {member.name: member.contribution for member in members}
    made = Pass(tuple(inputs), (output, *extra), saved, tuple(steps.steps))
    read = without_identity_casts(made, _is_plain(contributions))
    if fused:
        read = overlap(fuse(read, _allowed(contributions), RULES))
    read = over_groups(read, _over_groups(members))
    pairs = iter(zip(saved, read.saved, strict=True))
    return ForwardPlan(
        schedule_of(read),
        tuple([len(part.extra_outputs) for part in parts]),
        tuple([tuple([next(pairs) for _ in part.saved]) for part in parts]),
        read,
    )


def _over_groups(members: tuple[PassMember, ...]) -> list[str]:
    return [member.name for member in members if member.contribution.over_groups]


def _is_plain(contributions: dict[str, Contribution]) -> Callable[[CastSettings], bool]:
    return lambda cast: contributions[_operation(cast.layer)].is_plain(cast.layer)


def _plan_backward(key: tuple[BackwardKey, bool]) -> BackwardPlan:
    (members, saved, extra, quantized), fused = key
    steps, value = PassBuilder(".backward"), Value("dy", None, quantized)
    parts: list[BackwardPart] = []
    inputs = ["dy"]
    columns: list[Step] = []
    for member, kept, given in reversed(list(zip(members, saved, extra, strict=True))):
        grads = []
        for i, facts in enumerate(given):
            grads.append(
                None if facts is None else Value(f"{member.name}.grad_extra{i}", None, facts.quantized)
            )
            inputs += [] if facts is None else [f"{member.name}.grad_extra{i}"]
        names = tuple([name for name, _ in kept])
        grads_and_saved = BackwardInputs(names, tuple(grads))
        part = member.contribution.backward(steps, member.name, value, grads_and_saved)
        parts.insert(0, part)
        for name, source in kept:
            if source is not None and source not in inputs:
                inputs.append(source)
            # A plain layer saves the matrix itself and reads it by columns here.
            if name is not None and source is not None and name != source:
                columns.append(
                    Step("cast", (source,), (None, name), CastSettings(member.name, "", False, True))
                )
        if part.grad_input is not None:
            value = part.grad_input
    gradients = [parts[0].grad_input, *[grad for part in parts for grad in part.grad_extra_inputs]]
    grad_input, *extras = [
        grad and (grad.name if grad.quantized else steps.shaped(grad).name) for grad in gradients
    ]
    parameters = [name for part in parts for name in part.grad_parameters]
    # A buffer may be saved by several operations.
    read_columns = {step.results: step for step in columns}.values()
    made_pass = Pass(tuple(inputs), (grad_input, *parameters, *extras), (), (*read_columns, *steps.steps))
    contributions = {member.name: member.contribution for member in members}
    is_plain = _is_plain(contributions)
    read = _without_dense(without_identity_casts(made_pass, lambda cast: not cast.tensor or is_plain(cast)))
    if fused:
        read = overlap(fuse(read, _allowed(contributions), RULES))
    read = over_groups(read, _over_groups(members))
    return BackwardPlan(
        schedule_of(read),
        tuple([len(part.grad_parameters) for part in parts]),
        tuple([len(part.grad_extra_inputs) for part in parts]),
        read,
        any(gradient is not None and gradient.quantized for gradient in gradients),
    )


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


def forward_plan(members: tuple[PassMember, ...], quantized: bool, fused: bool) -> ForwardPlan:
    """Return the forward pass of operations, built at the first call.

    Args:
        members: The operations.
        quantized: The input is quantized.
        fused: Apply rules.
    """
    return _forward_plans[members, quantized, fused]


def backward_plan(key: BackwardKey, fused: bool) -> BackwardPlan:
    """Return the backward pass of operations, built at the first call; see `forward_plan`."""
    return _backward_plans[key, fused]


def traced_plans(
    members: tuple[PassMember, ...], quantized: bool, fused: bool
) -> tuple[ForwardPlan, BackwardPlan | None]:
    """Return both passes of operations that a compiler traces, which takes them as constants.

    The graph of a backward pass has all gradients of extra outputs, unquantized.
    """
    described = [
        (m.name, _constant_of(m.contribution), m.parameters, m.extra_inputs, m.saves) for m in members
    ]
    return _constant_plans(tuple(described), quantized, fused)


def _constant_of(value: Any) -> Any:
    """Return a frozen record, and those in it, as a constant of the compiler: (class name, field..)."""
    if type(value) is tuple:
        return ("tuple", *[_constant_of(part) for part in value])
    names = getattr(type(value), "__match_args__", None)
    if names is None:
        return value
    return (type(value).__name__, *[_constant_of(getattr(value, name)) for name in names])


def _record_of(constant: Any, kinds: dict[str, Any]) -> Any:
    """Return the record of a constant."""
    if type(constant) is not tuple:
        return constant
    name, *fields = constant
    made = [_record_of(field, kinds) for field in fields]
    return tuple(made) if name == "tuple" else kinds[name](*made)


@constant_while_tracing
def _constant_plans(
    described: tuple[Any, ...], quantized: bool, fused: bool
) -> tuple[ForwardPlan, BackwardPlan | None]:
    kinds = {kind.__name__: kind for kind in (Contribution, LinearFacts, *Contribution.__subclasses__())}
    kinds |= Contribution.records
    members = tuple(
        [PassMember(name, _record_of(constant, kinds), *rest) for name, constant, *rest in described]
    )
    plan = forward_plan(members, quantized, fused)
    reached = [i for i, member in enumerate(members) if member.saves]
    if not reached:
        return plan, None
    extra = tuple([(GradFacts(False),) * plan.extra_outputs[i] for i in reached])
    saved = tuple([plan.saved[i] for i in reached])
    key = BackwardKey(tuple([members[i] for i in reached]), saved, extra, False)
    return plan, backward_plan(key, fused)
