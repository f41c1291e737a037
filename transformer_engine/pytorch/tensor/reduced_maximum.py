"""max|x| over a process group: of quantizers that scale a tensor by its own maximum, when it is a shard."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch

Q = TypeVar("Q", bound="ReducesMaximum")


class ReducesMaximum:
    """with_amax_reduction: maxima are those over amax_reduction_group, so that all shards get the same scale."""

    with_amax_reduction: bool
    amax_reduction_group: torch.distributed.ProcessGroup | None

    def reducing_over(self: Q, group: torch.distributed.ProcessGroup) -> Q:
        """This quantizer, or a copy of it that reduces over the group."""
        if self.with_amax_reduction and self.amax_reduction_group is group:
            return self
        together = copy.copy(self)
        together.with_amax_reduction, together.amax_reduction_group = True, group
        return together

    def over_the_group(self, maxima: torch.Tensor) -> torch.Tensor:
        """The maxima of this rank's shard, replaced by those of the group."""
        torch.distributed.all_reduce(
            maxima, op=torch.distributed.ReduceOp.MAX, group=self.amax_reduction_group
        )
        return maxima

    def __getstate__(self) -> dict[str, Any]:
        # A process group lives as long as its process.
        return self.__dict__ | {"amax_reduction_group": None, "with_amax_reduction": False}
