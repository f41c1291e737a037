"""AddExtraInput and MakeExtraOutput: the two ends of a residual connection around a part of a chain."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ....common.numbers import to_bool
from ..chain import Call, TensorFacts
from ..pass_builder import Backward, ChainEnvironment, Contribution, Forward, Kept, PassBuilder, Value
from ..step_operation import StepOperation


@dataclass(frozen=True)
class AddContribution(Contribution):
    """Steps of AddExtraInput."""

    in_place: bool

    def forward(self, steps: PassBuilder, name: str, x: Value) -> Forward:
        x = steps.matrix(x)
        extra = f"{name}.extra0"
        if not self.in_place:
            other = steps.rows(extra)
            return Forward(Value(steps.one("add", (x.name, other), f"{name}.y"), x.leading))
        total = steps.rows(steps.one("alias", (extra,), f"{name}.total"))
        steps.one("accumulate", (total, x.name), f"{name}.y")
        return Forward(Value(f"{name}.y", x.leading))

    def backward(self, steps: PassBuilder, name: str, dy: Value, kept: Kept) -> Backward:
        return Backward(dy, (), (dy,))


class AddExtraInput(StepOperation):
    """y = x + extra, with an extra input of the same shape.

    Args:
        in_place: Add x into the memory of the extra input and return that memory. A preceding linear product then
            accumulates into it without storing x.
    """

    num_extra_inputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self._in_place = to_bool("in_place", in_place)

    def contribute(
        self, name: str, x: TensorFacts, call: Call, environment: ChainEnvironment
    ) -> tuple[Contribution, TensorFacts]:
        (extra,) = call.extra
        if extra.shape != x.shape:
            raise ValueError(
                f"AddExtraInput adds an extra input {list(extra.shape)} to an input {list(x.shape)}; give both the "
                "same shape"
            )
        return AddContribution(self._in_place), TensorFacts(
            x.shape, extra.dtype if self._in_place else x.dtype, x.device
        )

    def extra_repr(self) -> str:
        return f"in_place={self._in_place}"


@dataclass(frozen=True)
class ExtraOutputContribution(Contribution):
    """Steps of MakeExtraOutput; `writable`: the gradient of the extra output may be accumulated into."""

    in_place: bool
    writable: bool = False

    def forward(self, steps: PassBuilder, name: str, x: Value) -> Forward:
        return Forward(x, (), (x,))

    def with_writable_gradients(self, writable: tuple[bool, ...]) -> Contribution:
        return replace(self, writable=writable[0])

    def backward(self, steps: PassBuilder, name: str, dy: Value, kept: Kept) -> Backward:
        (extra,) = kept.grad_extra_outputs
        if extra is None:
            return Backward(dy)
        dy, other = steps.matrix(dy), steps.rows(extra.name)
        if self.in_place and self.writable:
            steps.one("accumulate", (other, dy.name), f"{name}.dx")
        else:
            steps.one("add", (dy.name, other), f"{name}.dx")
        return Backward(Value(f"{name}.dx", dy.leading))


class MakeExtraOutput(StepOperation):
    """y = x, which is also an extra output.

    Args:
        in_place: In the backward pass, add the gradient of y into the memory of the extra output's gradient. The input
            gradient of a following linear product then accumulates into it. Use it only if nothing else reads that
            gradient.
    """

    num_extra_outputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self._in_place = to_bool("in_place", in_place)

    def contribute(
        self, name: str, x: TensorFacts, call: Call, environment: ChainEnvironment
    ) -> tuple[Contribution, TensorFacts]:
        return ExtraOutputContribution(self._in_place), x

    def extra_repr(self) -> str:
        return f"in_place={self._in_place}"
