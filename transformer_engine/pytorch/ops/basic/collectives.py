"""AllGather, AllReduce and ReduceScatter over a process group, along the first dimension."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ....common.numbers import to_bool
from ...distributed.collectives import world_size
from ...distributed.tensor_parallel import TensorParallel
from ..pass_operation import PassOperation
from ..passes.collectives import CollectivePasses
from ..passes.contract import IdentityPasses, InputFacts, OperationCall, OperationPasses


class CollectiveOperation(PassOperation):
    """Base class for collectives.

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

    def passes(self, x: InputFacts, call: OperationCall) -> tuple[OperationPasses, InputFacts]:
        size = world_size(self.process_group)
        if size == 1:
            return IdentityPasses(), x
        group = torch.distributed.group.WORLD if self.process_group is None else self.process_group
        shape = (self.rows(x.shape[0], size), *x.shape[1:])
        parallel = TensorParallel("row", group, size, True)
        result = CollectivePasses(self.collective, self.gradient, parallel)
        return result, InputFacts(shape, x.dtype, x.device)

    def rows(self, rows: int, size: int) -> int:
        """Return the first output dimension for a first input dimension."""
        return rows


class AllGather(CollectiveOperation):
    """Concatenate the inputs from all ranks along the first dimension; the backward pass reduces and scatters.

    Args:
        process_group: Process group; None for one rank.
    """

    collective, gradient = "all_gather", "reduce_scatter"

    def rows(self, rows: int, size: int) -> int:
        return rows * size


class ReduceScatter(CollectiveOperation):
    """Sum the inputs from all ranks and return this rank's part of the first dimension; the backward pass gathers.

    Args:
        process_group: Process group; None for one rank.

    Raises:
        RuntimeError: In the forward pass, the first dimension is not divisible by the rank count.
    """

    collective, gradient = "reduce_scatter", "all_gather"

    def rows(self, rows: int, size: int) -> int:
        if rows % size:
            raise RuntimeError(
                f"ReduceScatter over {size} ranks cannot split a first dimension of {rows}; pad the input"
            )
        return rows // size


class AllReduce(CollectiveOperation):
    """Sum the inputs from all ranks; the backward pass is the identity.

    Args:
        process_group: Process group; None for one rank.
        reduce_in_backward: Accepted for compatibility: the gradient of the sum is equal on all ranks.
    """

    collective, gradient = "all_reduce", None

    def __init__(self, process_group: Any = None, reduce_in_backward: bool = True) -> None:
        super().__init__(process_group)
        self.reduce_in_backward = to_bool("reduce_in_backward", reduce_in_backward)
