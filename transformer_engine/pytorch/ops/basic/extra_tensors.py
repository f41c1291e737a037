"""AddExtraInput and MakeExtraOutput: the two ends of a residual connection around a part of a chain."""

from __future__ import annotations

from dataclasses import dataclass

from ....common.numbers import to_bool
from ..chain import ChainEnvironment, InputFacts, OperationCall
from ..pass_builder import BackwardInputs, BackwardPart, Contribution, ForwardPart, PassBuilder, Value
from ..step_operation import StepOperation


@dataclass(frozen=True)
class AddContribution(Contribution):
    """Steps of AddExtraInput; `shared`: other operations read the memory of the extra input."""

    in_place: bool
    shared: bool = False

    def forward(self, steps: PassBuilder, name: str, x: Value) -> ForwardPart:
        x = steps.matrix(x)
        extra = f"{name}.extra0"
        if not self.in_place:
            other = steps.rows(extra)
            return ForwardPart(Value(steps.one("add", (x.name, other), f"{name}.y"), x.leading))
        if self.shared:
            values = steps.one("values", (extra,), f"{name}.extra_values")
            memory = steps.one("copy", (values,), f"{name}.total")
        else:
            memory = steps.one("alias", (extra,), f"{name}.total")
        total = steps.rows(memory)
        steps.one("accumulate", (total, x.name), f"{name}.y")
        return ForwardPart(Value(f"{name}.y", x.leading))

    def backward(self, steps: PassBuilder, name: str, dy: Value, kept: BackwardInputs) -> BackwardPart:
        return BackwardPart(dy, (), (dy,))


class AddExtraInput(StepOperation):
    """y = x + extra, with an extra input of the same shape.

    Args:
        in_place: Add x into the memory of the extra input and return that memory. A preceding linear product then
            accumulates into it without storing x. Memory that others read is copied first: an extra input from a
            channel, one that shares memory with another input of the chain, and a leaf that requires a gradient.
    """

    num_extra_inputs = 1
    _shown = {"in_place": "_in_place"}

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self._in_place = to_bool("in_place", in_place)

    def contribute(
        self, name: str, x: InputFacts, call: OperationCall, environment: ChainEnvironment
    ) -> tuple[Contribution, InputFacts]:
        (extra,) = call.extra
        if extra.shape != x.shape:
            raise ValueError(
                f"AddExtraInput adds an extra input {list(extra.shape)} to an input {list(x.shape)}; give both the "
                "same shape"
            )
        shared = self._extra_input_channels[0] is not None
        return AddContribution(self._in_place, shared), InputFacts(
            x.shape, extra.dtype if self._in_place else x.dtype, x.device
        )


@dataclass(frozen=True)
class ExtraOutputContribution(Contribution):
    """Steps of MakeExtraOutput."""

    in_place: bool

    def forward(self, steps: PassBuilder, name: str, x: Value) -> ForwardPart:
        steps.shared.add(x.name)
        return ForwardPart(x, (), (x,))

    def backward(self, steps: PassBuilder, name: str, dy: Value, kept: BackwardInputs) -> BackwardPart:
        (extra,) = kept.grad_extra_outputs
        if extra is None:
            return BackwardPart(dy)
        if dy.quantized or extra.quantized:
            dy = dy if dy.quantized else steps.shaped(dy)
            return BackwardPart(Value(steps.one("sum_values", (dy.name, extra.name), f"{name}.dx")))
        dy = steps.matrix(dy)
        if self.in_place:
            # Autograd may pass the same gradient tensor to others.
            total = steps.rows(steps.one("copy", (extra.name,), f"{name}.total"))
            steps.one("accumulate", (total, dy.name), f"{name}.dx")
        else:
            steps.one("add", (dy.name, steps.rows(extra.name)), f"{name}.dx")
        return BackwardPart(Value(f"{name}.dx", dy.leading))


class MakeExtraOutput(StepOperation):
    """y = x, which is also an extra output.

    Args:
        in_place: In the backward pass, add the gradient of y into a copy of the extra output's gradient. The input
            gradient of a following linear product then accumulates into it.
    """

    num_extra_outputs = 1
    _shown = {"in_place": "_in_place"}

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self._in_place = to_bool("in_place", in_place)

    def contribute(
        self, name: str, x: InputFacts, call: OperationCall, environment: ChainEnvironment
    ) -> tuple[Contribution, InputFacts]:
        return ExtraOutputContribution(self._in_place), x
