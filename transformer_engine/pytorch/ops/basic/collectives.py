"""AllGather, AllReduce and ReduceScatter over a process group, along the first dimension."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common.numbers import to_bool
from ....common.passes.vocabulary import Collective
from ...distributed.collectives import world_size
from ...distributed.tensor_parallel import TensorParallel
from ..chain import ChainEnvironment, InputFacts, OperationCall
from ..pass_builder import BackwardInputs, BackwardPart, Contribution, ForwardPart, PassBuilder, Value
from ..step_operation import StepOperation

# Steps whose first result nothing else reads later, unless it is an extra output.
_FRESH = frozenset({"product", "add_bias"})


class Boundary(NamedTuple):
    """A process group, where the steps of a collective look for that of a linear layer."""

    parallel: TensorParallel


@dataclass(frozen=True)
class CollectiveContribution(Contribution):
    """Steps of a collective.

    Attributes:
        collective: The collective of the forward pass.
        gradient: That of the backward pass; None for the identity.
    """

    collective: str
    gradient: str | None

    def forward(self, steps: PassBuilder, name: str, x: Value) -> ForwardPart:
        return ForwardPart(_communicated(steps, self.collective, name, x, f"{name}.y"))

    def backward(self, steps: PassBuilder, name: str, dy: Value, kept: BackwardInputs) -> BackwardPart:
        if self.gradient is None:
            return BackwardPart(dy)
        return BackwardPart(_communicated(steps, self.gradient, name, dy, f"{name}.dx"))


def _communicated(steps: PassBuilder, collective: str, name: str, x: Value, made: str) -> Value:
    fresh = x.name not in steps.shared and any(
        step.op in _FRESH and x.name in step.results for step in steps.steps
    )
    x = steps.shaped(x)
    if collective == "all_reduce" and not fresh:
        x = Value(steps.one("copy", (x.name,), f"{made}.copy"))  # the sum is written in place
    contiguous = steps.one("dense", (x.name,), f"{made}.dense")
    pending = steps.one(f"{collective}.begin", (contiguous,), f"{made}.pending", Collective(name))
    return Value(steps.one(f"{collective}.wait", (pending,), made, Collective(name)))


class CollectiveOperation(StepOperation):
    """Base of the collectives.

    Args:
        process_group: The process group, by default the world group.
    """

    collective: str
    gradient: str | None

    def __init__(self, process_group: Any = None) -> None:
        super().__init__()
        self.process_group = process_group

    def call_facts(self, extra_inputs: tuple[Tensor, ...]) -> Hashable:
        return world_size(self.process_group)

    def contribute(
        self, name: str, x: InputFacts, call: OperationCall, environment: ChainEnvironment
    ) -> tuple[Contribution, InputFacts]:
        size = world_size(self.process_group)
        if size == 1:
            return Contribution(), x
        group = torch.distributed.group.WORLD if self.process_group is None else self.process_group
        environment.linears[name] = Boundary(TensorParallel("row", group, size, True))
        shape = (self.rows(x.shape[0], size), *x.shape[1:])
        return CollectiveContribution(self.collective, self.gradient), InputFacts(shape, x.dtype, x.device)

    def rows(self, rows: int, size: int) -> int:
        """Return the first dimension of the output for that of the input."""
        return rows


class AllGather(CollectiveOperation):
    """Concatenate the inputs of all ranks along the first dimension; the backward pass reduces and scatters.

    Args:
        process_group: Process group; None for one rank.
    """

    collective, gradient = "all_gather", "reduce_scatter"

    def rows(self, rows: int, size: int) -> int:
        return rows * size


class ReduceScatter(CollectiveOperation):
    """Sum the inputs of all ranks and return this rank's part of the first dimension; the backward pass gathers.

    Args:
        process_group: Process group; None for one rank.

    Raises:
        RuntimeError: In the forward pass, the first dimension is not divisible by the number of ranks.
    """

    collective, gradient = "reduce_scatter", "all_gather"

    def rows(self, rows: int, size: int) -> int:
        if rows % size:
            raise RuntimeError(
                f"ReduceScatter over {size} ranks cannot split a first dimension of {rows}; pad the input"
            )
        return rows // size


class AllReduce(CollectiveOperation):
    """Sum the inputs of all ranks; the backward pass is the identity.

    Args:
        process_group: Process group; None for one rank.
        reduce_in_backward: Accepted for compatibility: the gradient of the sum is equal on all ranks.
    """

    collective, gradient = "all_reduce", None

    def __init__(self, process_group: Any = None, reduce_in_backward: bool = True) -> None:
        super().__init__(process_group)
        self.reduce_in_backward = to_bool("reduce_in_backward", reduce_in_backward)
