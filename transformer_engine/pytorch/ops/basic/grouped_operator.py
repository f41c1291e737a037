"""GroupedLinear while a compiler traces: one operator per pass, because a graph has unknown rows per group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ....common.passes.schedule import needed_for
from ....common.passes.step import Step
from ....common.passes.vocabulary import Named
from ....common.recipe import Recipe, description_of, recipe_described_as
from ...functions.grouped_call import GroupedCall, GroupedSpec
from ...functions.grouped_operators import GroupedKernel, gradients_of_key, register
from ...functions.linear_spec import Environment
from ...functions.run import run, schedule_of
from ...quantization.autocast import AutocastState
from ...runtime.tracing import constant_while_tracing
from ..chain import ChainEnvironment, InputFacts, OperationCall
from ..chain_plans import BackwardKey, PassMember, backward_plan, forward_plan
from ..pass_builder import BackwardInputs, BackwardPart, Contribution, ForwardPart, PassBuilder, Value
from ..recipe_slots import MODES, by_key
from .grouped_contribution import GroupedKind

OPERATOR_KEY = "operator"  # slot of an operation's kernel in a graph


@dataclass(frozen=True)
class OperatorContribution(Contribution):
    """Steps of a grouped linear layer that a compiler traces: one operator per pass.

    Attributes:
        parameters: Names of the parameters.
        extra: Number of extra inputs.
        present: Of the input, each parameter and each extra input, whether its gradient is computed.
        scales: Number of delayed-scaling states of the forward pass.
    """

    parameters: tuple[str, ...]
    extra: int
    present: tuple[bool, ...]
    scales: int

    def forward(self, steps: PassBuilder, name: str, x: Value) -> ForwardPart:
        read = [steps.shaped(x).name]
        read += [f"{name}.{parameter}" for parameter in self.parameters]
        read += [f"{name}.extra{i}" for i in range(self.extra)]
        scales = [f"{name}.scale{i}" for i in range(self.scales)]
        settings = Named(name, OPERATOR_KEY)
        steps.steps.append(Step("grouped_operator", tuple(read), (f"{name}.y", *scales), settings))
        return ForwardPart(Value(f"{name}.y"), (*read, *scales))

    def backward(self, steps: PassBuilder, name: str, dy: Value, kept: BackwardInputs) -> BackwardPart:
        grads = [f"{name}.grad{i}" if there else None for i, there in enumerate(self.present)]
        if any(self.present):
            read = (steps.shaped(dy).name, *kept.saved)
            settings = Named(name, OPERATOR_KEY)
            steps.steps.append(Step("grouped_operator_backward", read, tuple(grads), settings))
        count = 1 + len(self.parameters)
        extra = [None if grad is None else Value(grad) for grad in grads[count:]]
        return BackwardPart(
            None if grads[0] is None else Value(grads[0]), tuple(grads[1:count]), tuple(extra)
        )


def traced_contribution(
    op: Any, name: str, x: InputFacts, call: OperationCall, environment: ChainEnvironment
) -> tuple[Contribution, InputFacts]:
    """Describe a traced call of a `GroupedLinear`; see `StepOperation.contribute`.

    Raises:
        NotImplementedError: The call has buffers of the caller, or effects that operators cannot have.
    """
    if call.options:
        raise NotImplementedError(
            f"GroupedLinear takes no caller buffers in a compiled graph, but got {sorted(call.options)}; leave them "
            "out, or call the operation in eager mode"
        )
    state = call.state
    active = state.enabled or state.calibrating
    states = [op.delayed_states(mode) if active else () for mode in MODES]
    key = _registered_while_tracing(
        op._replay_key,
        description_of(state.recipe) if active else None,
        (state.enabled, state.calibrating, call.saves, call.grad_input),
        state.group,
        call.autocast,
        (x.dtype, x.device, x.subclass, *[extra.dtype for extra in call.extra]),
    )
    names = tuple([own for own in op.parameter_names if getattr(op, own) is not None])
    environment.objects[name, OPERATOR_KEY] = (key, len(names), *states)
    contribution = OperatorContribution(names, len(call.extra), gradients_of_key(key), len(states[0]))
    dtype = call.autocast or getattr(op, names[0]).dtype
    return contribution, InputFacts((*x.shape[:-1], op.out_features), dtype, x.device)


@constant_while_tracing
def _registered_while_tracing(
    key: str,
    recipe: str | None,
    flags: tuple[bool, bool, bool, bool],
    group: Any,
    autocast: torch.dtype | None,
    facts: tuple[Any, ...],
) -> str:
    """Return the key of the operators of a kind of call.

    Args:
        key: Key of the operation.
        recipe: Description of the recipe; None without one.
        flags: Whether autocast is enabled and calibrates, a backward pass will follow, and reach the input.
        group: Group over which maxima are reduced.
        autocast: Dtype of torch.autocast.
        facts: Dtype and device of the input, whether it is a subclass, and the dtypes of the extra inputs.
    """
    op: Any = by_key[key]
    enabled, calibrating, saves, grad_input = flags
    dtype, device, subclass, sizes, *scales = facts
    state = AutocastState(
        enabled, calibrating, None if recipe is None else recipe_described_as(recipe), group
    )
    extra = [
        InputFacts((op.num_groups,), sizes, device),
        *[InputFacts((0,), kind, device) for kind in scales],
    ]
    rows = torch.zeros(op.num_groups, dtype=torch.int64, device="cpu")
    call = OperationCall(state, autocast, False, saves, grad_input, tuple(extra), (rows,), {})
    environment = ChainEnvironment()
    x = InputFacts((0, op.in_features), dtype, device, False, subclass)
    contribution, _ = op.contribute("0", x, call, environment)
    member = PassMember("0", contribution, tuple(op.pass_parameters()), len(extra), saves)
    states = tuple([op.delayed_states(mode) if enabled or calibrating else () for mode in MODES])
    return register(op, _kernel(member, environment, states))


def _kernel(member: PassMember, environment: ChainEnvironment, states: Any) -> GroupedKernel:
    """Return the passes of an operation as operators run them.

    Args:
        member: The operation, as eager mode describes it.
        environment: The environment that it filled.
        states: Delayed-scaling states of the forward and of the backward pass.
    """
    kind: GroupedKind = environment.of_call[member.name].__self__  # pyright: ignore[reportFunctionMemberAccess]
    plan = forward_plan((member,), False, True)
    forward, backward, order = plan.steps, plan.schedule, ()
    present = (False,) * len(forward.inputs)
    if member.saves:
        planned = backward_plan(BackwardKey((member,), plan.saved, ((),), False), True)
        places = {source: place for place, (_, source) in enumerate(plan.saved[0]) if source is not None}
        backward, order = planned.schedule, tuple([places[buffer] for buffer in planned.steps.inputs[1:]])
        present = tuple([result is not None for result in planned.steps.results])
    weights = [i for i, parameter in enumerate(member.parameters) if parameter.startswith("weight")]
    fixed = replace(kind, weights=tuple)  # without a reference to the operation

    def call(spec: GroupedSpec, rows: Tensor, x: Tensor, tensors: Sequence[Tensor]) -> GroupedCall:
        held = [tensors[i] for i in weights]
        total = x.numel() // max(x.shape[-1], 1)
        return replace(fixed, spec=spec, total=total, device=x.device, weights=lambda: held).call(rows)

    inference = schedule_of(needed_for(forward, forward.results, ()))
    again = schedule_of(needed_for(forward, (), forward.saved))
    dtypes = environment.dtypes[member.name]

    def environment_of(call: GroupedCall) -> Environment:
        return Environment({member.name: call}, {member.name: dtypes}, ())  # pyright: ignore[reportArgumentType]

    def saved_of(call: GroupedCall, inputs: list[Any]) -> list[Any]:
        saved = run(again, environment_of(call), inputs)[1]
        return [saved[i] for i in order]

    return GroupedKernel(
        spec=kind.spec,
        inference=lambda call, inputs: run(inference, environment_of(call), inputs)[0][0],
        again=saved_of,
        backward=lambda call, operands: run(backward, environment_of(call), operands)[0],
        lists=None,
        present=present,
        call=call,
        states=states,
    )


def is_op_fuser_grouped_tensor_path_supported(recipe: Recipe | None, dtype: torch.dtype) -> bool:
    """Return whether the original's single-launch path for grouped tensors is available; it never is here.

    `GroupedLinear` computes the same results without it.
    """
    return False
