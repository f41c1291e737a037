"""GroupedLinear while a compiler traces: one operator per pass, because a graph has unknown rows per group."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....common.recipe import Recipe, recipe_described_as, recipe_description
from ...functions.grouped_call import GroupedCall, GroupedSpec
from ...functions.grouped_operators import (
    GroupedKernel,
    backward_in_graph,
    forward_in_graph,
    gradients_of_key,
    register,
)
from ...quantization.autocast import AutocastState
from ...runtime.autograd import disable_autocast
from ...runtime.tracing import constant_while_tracing
from ..passes.contract import (
    BackwardResult,
    ForwardResult,
    InputFacts,
    Leading,
    OperationCall,
    OperationPasses,
    OpTensors,
    ReaderCast,
    Value,
)
from ..passes.grouped import GroupedPasses
from ..recipe_slots import MODES, operations_by_name


class OperatorPasses(OperationPasses):
    """A grouped linear layer that a compiler traces: one operator per pass.

    Args:
        key: Operator key.
        parameters: Parameter count.
        states: Delayed-scaling states for the forward and the backward pass.
    """

    listed = False

    def __init__(self, key: str, parameters: int, states: Sequence[Any]) -> None:
        self.key, self.count, self.states = key, parameters, states
        # Of the input, each parameter and each extra input, whether its gradient is computed.
        self.present = gradients_of_key(key)

    def fused_forward(
        self, x: Value, tensors: OpTensors, request: ReaderCast | None = None
    ) -> ForwardResult:
        values = x.shaped()
        inputs = (*tensors.parameters, *tensors.extra)
        y, scales = forward_in_graph(self.key, values, inputs[self.count], inputs, self.states[0])
        return ForwardResult(Value(y), (values, *inputs, *scales))

    def fused_backward(
        self,
        operands: list[Any],
        leading: Leading,
        grads: Sequence[Any],
        request: ReaderCast | None = None,
    ) -> BackwardResult:
        dy, x, *rest = operands
        operands.clear()
        gradients: Sequence[Any] = (None,) * len(self.present)
        if any(self.present):
            tensors = rest[: len(self.present) - 1]
            saved = Value(dy, leading).shaped(), x, rest[self.count], tensors
            gradients = backward_in_graph(self.key, saved, rest[len(tensors) :], self.states[1])
        first = 1 + self.count
        extra = [None if grad is None else Value(grad) for grad in gradients[first:]]
        return BackwardResult(
            None if gradients[0] is None else Value(gradients[0]), tuple(gradients[1:first]), extra
        )


def traced_passes(
    op: Any, x: InputFacts, call: OperationCall
) -> tuple[OperationPasses, InputFacts]:
    """Describe a traced `GroupedLinear` call; see `PassOperation.passes`.

    Raises:
        NotImplementedError: The call has caller-owned buffers, or effects that operators cannot have.
    """
    if call.options:
        raise NotImplementedError(
            f"GroupedLinear takes no caller buffers in a compiled graph, but got {sorted(call.options)}; leave them "
            "out, or call the operation in eager mode"
        )
    state = call.state
    active = state.enabled or state.calibrating
    states = [op.delayed_states(mode) if active else () for mode in MODES]
    key = _register_while_tracing(
        op._traced_name,
        recipe_description(state.recipe) if active else None,
        (state.enabled, state.calibrating, call.saves, call.grad_input),
        state.group,
        call.autocast,
        (x.dtype, x.device, x.subclass, *[extra.dtype for extra in call.extra]),
    )
    names = tuple([name for name in op.parameter_names if getattr(op, name) is not None])
    dtype = call.autocast or getattr(op, names[0]).dtype
    return OperatorPasses(key, len(names), states), InputFacts(
        (*x.shape[:-1], op.out_features), dtype, x.device
    )


@constant_while_tracing
def _register_while_tracing(
    key: str,
    recipe: str | None,
    flags: tuple[bool, bool, bool, bool],
    group: Any,
    autocast: torch.dtype | None,
    facts: tuple[Any, ...],
) -> str:
    """Return the operator key for a call kind.

    Args:
        key: Operation key.
        recipe: Recipe description; None without one.
        flags: Whether autocast is enabled and calibrates, a backward pass will follow, and reach the input.
        group: Group over which maxima are reduced.
        autocast: torch.autocast dtype.
        facts: Input dtype and device, whether it is a subclass, and the extra input dtypes.
    """
    op: Any = operations_by_name[key]
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
    call = OperationCall(
        state, autocast, False, saves, grad_input, saves, tuple(extra), (rows,), {}
    )
    passes, _ = op.passes(InputFacts((0, op.in_features), dtype, device, False, subclass), call)
    states = tuple([op.delayed_states(mode) if enabled or calibrating else () for mode in MODES])
    return register(op, _kernel(passes, len(extra), states))


def _kernel(passes: GroupedPasses, extra: int, states: Any) -> GroupedKernel:
    """The passes of an operation as operators run them.

    Args:
        passes: Eager-mode passes.
        extra: Extra input count.
        states: Delayed-scaling states for the forward and the backward pass.
    """
    group, names = passes.spec.groups[0], passes.names
    needs = {"weight": group.needs_grad_weight, "bias": passes.grad_bias}
    of_parameters = [needs["weight" if name.startswith("weight") else "bias"] for name in names]
    of_scales = passes.scale_bias and passes.spec.needs_grad
    present = (group.needs_grad_input, *of_parameters, *(False, of_scales)[:extra])
    weights = [i for i, name in enumerate(names) if name.startswith("weight")]
    passes = copy.copy(passes)
    passes.weights = tuple  # without a reference to the operation

    def call(spec: GroupedSpec, rows: Tensor, x: Tensor, tensors: Sequence[Tensor]) -> GroupedCall:
        run = copy.copy(passes)
        run.spec, run.weights = spec, lambda: [tensors[i] for i in weights]
        run.total, run.device = x.numel() // max(x.shape[-1], 1), x.device
        return run.bind_rows(rows)

    def forward(call: GroupedCall, inputs: Sequence[Tensor], compute_y: bool) -> ForwardResult:
        tensors = OpTensors(inputs[1 : 1 + len(names)], inputs[1 + len(names) :])
        return passes.with_call(call).fused_forward(Value(inputs[0]), tensors, compute_y=compute_y)

    def backward(call: GroupedCall, operands: list[Any]) -> list[Any]:
        gradients = passes.with_call(call).fused_backward(operands, None, ())
        grad_input = None if gradients.grad_input is None else gradients.grad_input.shaped()
        extra_grads = [None if grad is None else grad.shaped() for grad in gradients.extra]
        return [grad_input, *gradients.parameters, *extra_grads]

    return GroupedKernel(
        spec=passes.spec,
        inference=lambda call, inputs: disable_autocast(forward)(
            call, inputs, True
        ).output.shaped(),
        again=lambda call, inputs: list(disable_autocast(forward)(call, inputs, False).saved),
        backward=disable_autocast(backward),
        present=present,
        call=call,
        states=states,
    )


def is_op_fuser_grouped_tensor_path_supported(recipe: Recipe | None, dtype: torch.dtype) -> bool:
    """Return whether the original's single-launch path for grouped tensors is available; it never is here.

    `GroupedLinear` computes the same results without it.
    """
    return False
