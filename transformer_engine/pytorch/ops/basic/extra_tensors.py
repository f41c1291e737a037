"""AddExtraInput and MakeExtraOutput: the two ends of a residual connection around a part of a chain."""

from __future__ import annotations

from ....common.numbers import to_bool
from ..pass_operation import PassOperation
from ..passes.contract import InputFacts, OperationCall, OperationPasses
from ..passes.extra_tensors import AddPasses, ExtraOutputPasses


class AddExtraInput(PassOperation):
    """y = x + extra, with an extra input in the same shape.

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

    def passes(self, x: InputFacts, call: OperationCall) -> tuple[OperationPasses, InputFacts]:
        (extra,) = call.extra
        if extra.shape != x.shape:
            raise ValueError(
                f"AddExtraInput adds an extra input {list(extra.shape)} to an input {list(x.shape)}; give both the "
                "same shape"
            )
        shared = self._extra_input_channels[0] is not None
        return AddPasses(self._in_place, shared), InputFacts(
            x.shape, extra.dtype if self._in_place else x.dtype, x.device
        )


class MakeExtraOutput(PassOperation):
    """y = x, which is also an extra output.

    Args:
        in_place: In the backward pass, add the gradient of y into a copy of the extra output's
            gradient. The input gradient of a following linear product then accumulates into it.
    """

    num_extra_outputs = 1
    _shown = {"in_place": "_in_place"}

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self._in_place = to_bool("in_place", in_place)

    def passes(self, x: InputFacts, call: OperationCall) -> tuple[OperationPasses, InputFacts]:
        return ExtraOutputPasses(self._in_place), x
