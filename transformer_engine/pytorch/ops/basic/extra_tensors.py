"""AddExtraInput and MakeExtraOutput: the two ends of a residual connection around a part of a chain."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ....common.numbers import to_bool
from ..chain import ChainEnvironment, InputFacts, OperationCall
from ..pass_builder import BackwardInputs, BackwardPart, Contribution, ForwardPart, PassBuilder, Value
from ..step_operation import StepOperation


@dataclass(frozen=True)
class AddContribution(Contribution):
    """Steps of AddExtraInput."""

    in_place: bool

    def forward(self, steps: PassBuilder, name: str, x: Value) -> ForwardPart:
        x = steps.matrix(x)
        extra = f"{name}.extra0"
        if not self.in_place:
            other = steps.rows(extra)
            return ForwardPart(Value(steps.one("add", (x.name, other), f"{name}.y"), x.leading))
        total = steps.rows(steps.one("alias", (extra,), f"{name}.total"))
        steps.one("accumulate", (total, x.name), f"{name}.y")
        return ForwardPart(Value(f"{name}.y", x.leading))

    def backward(self, steps: PassBuilder, name: str, dy: Value, kept: BackwardInputs) -> BackwardPart:
        return BackwardPart(dy, (), (dy,))


class AddExtraInput(StepOperation):
    """y = x + extra, with an extra input of the same shape.

    Args:
        in_place: Add x into the memory of the extra input and return that memory. A preceding linear product then
            accumulates into it without storing x.
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
        return AddContribution(self._in_place), InputFacts(
            x.shape, extra.dtype if self._in_place else x.dtype, x.device
        )


@dataclass(frozen=True)
class ExtraOutputContribution(Contribution):
    """Steps of MakeExtraOutput; `writable`: the gradient of the extra output may be accumulated into."""

    in_place: bool
    writable: bool = False

    def forward(self, steps: PassBuilder, name: str, x: Value) -> ForwardPart:
        return ForwardPart(x, (), (x,))

    def with_writable_gradients(self, writable: tuple[bool, ...]) -> Contribution:
        return replace(self, writable=writable[0])

    def backward(self, steps: PassBuilder, name: str, dy: Value, kept: BackwardInputs) -> BackwardPart:
        (extra,) = kept.grad_extra_outputs
        if extra is None:
            return BackwardPart(dy)
        dy, other = steps.matrix(dy), steps.rows(extra.name)
        if self.in_place and self.writable:
            steps.one("accumulate", (other, dy.name), f"{name}.dx")
        else:
            steps.one("add", (dy.name, other), f"{name}.dx")
        return BackwardPart(Value(f"{name}.dx", dy.leading))


class MakeExtraOutput(StepOperation):
    """y = x, which is also an extra output.

    Args:
        in_place: In the backward pass, add the gradient of y into the memory of the extra output's gradient. The input
            gradient of a following linear product then accumulates into it. Use it only if nothing else reads that
            gradient.
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
