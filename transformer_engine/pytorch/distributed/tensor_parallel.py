"""Communication between a linear layer y = x @ w.T and its tensor-parallel group before and after a product.

| mode | w on a rank | enter_forward(x) | leave_forward(y) | enter_backward(dy) | leave_backward(dx) |
| --- | --- | --- | --- | --- | --- |
| column | [N / n, K] | (all-gather) | - | - | sum (reduce-scatter) |
| row | [N, K / n] | - | sum (reduce-scatter) | (all-gather) | - |

With sequence parallelism (arXiv:2205.05198) the activations outside are split along the first dimension, and
the operations in parentheses apply: gathers are added and each sum over ranks becomes a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common.checks import check_option, function, function_or_none, whole
from ...common.numbers import to_bool, to_int
from ..constants import GemmParallelModes, dist_group_type
from ..runtime import checks
from ..runtime.warn_once import warn_once
from .collectives import (
    allreduce,
    gather_along_first_dim,
    reduce_scatter_along_first_dim,
    world_size,
)
from .rng import CudaRNGStatesTracker
from .symmetric_memory import symmetric_all_reduce


class Overlap(NamedTuple):
    """Which collectives in a layer overlap with their own products; see `overlap`.

    Attributes:
        gather: Gathers of the input or the output gradient.
        scatter: Sums over ranks for the output or the input gradient.
    """

    gather: bool = False
    scatter: bool = False


NO_OVERLAP = Overlap()


class OverlapFlags(NamedTuple):
    """`ub_*` flags of a layer, by the names in its constructor."""

    ub_overlap_ag: bool = False
    ub_overlap_rs: bool = False
    ub_overlap_rs_dgrad: bool = False
    ub_bulk_dgrad: bool = False
    ub_bulk_wgrad: bool = False

    def of(self, mode: str | None) -> Overlap:
        """Return the overlap for a column-parallel or row-parallel product."""
        if mode == "row":
            return Overlap(self.ub_overlap_ag, self.ub_overlap_rs)
        if mode == "column":
            gather = self.ub_overlap_ag or self.ub_bulk_dgrad
            return Overlap(gather, self.ub_overlap_rs_dgrad or self.ub_bulk_wgrad)
        return NO_OVERLAP


NO_FLAGS = OverlapFlags()


def warn_of_unused_overlap(arguments: str, stacklevel: int = 4) -> None:
    """Warn once that arguments which request overlap have no effect on a layer without sequence parallelism."""
    warn_once(
        f"{arguments} without sequence parallelism",
        f"{arguments} has no effect: only layers that are sharded over several ranks with sequence_parallel=True "
        "gather and scatter rows. Shard the layer in this way, or leave the argument out",
        stacklevel,
    )


@dataclass(frozen=True)
class TensorParallel:
    """The boundary of one linear layer. Every method is the identity if the group has one rank.

    Args:
        mode: "column", "row" or None (no communication).
        group: Tensor-parallel process group.
        size: Rank count in the group.
        sequence: Activations outside the layer pair are sharded along their first dimension.
        symmetric: Algorithm over symmetric memory that sums the output of a row-parallel layer.
        overlap: Collectives that overlap with their products, with sequence parallelism.
        layer: The layer's config, whose `shared_settings()` all ranks must have in common.
    """

    mode: str | None = None
    group: dist_group_type | None = None
    size: int = 1
    sequence: bool = False
    symmetric: str | None = None
    overlap: Overlap = NO_OVERLAP
    layer: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_option("parallel_mode", self.mode, GemmParallelModes)
        whole("tp_size", self.size)

    @property
    def gathers_input(self) -> bool:
        """Whether enter_forward communicates."""
        return self.mode == "column" and self.sequence and self.size > 1

    @property
    def gathers_gradient(self) -> bool:
        """Whether enter_backward communicates."""
        return self.mode == "row" and self.sequence and self.size > 1

    @property
    def sums_symmetrically(self) -> bool:
        """Whether the output of the layer is summed by `symmetric_all_reduce`."""
        return (
            self.mode == "row"
            and self.symmetric is not None
            and self.size > 1
            and not self.sequence
        )

    def enter_forward(self, x: Tensor) -> Tensor:
        """Return x for this rank's product: gathered along the sequence for a column-parallel layer."""
        return self._gathered(x) if self.mode == "column" and self.sequence else x

    def leave_forward(self, y: Tensor) -> Tensor:
        """Return y summed over the ranks of a row-parallel layer; y may be overwritten."""
        if self.sums_symmetrically:
            return symmetric_all_reduce(y, self.checked_group(), all_reduce_type=self.symmetric)[0]
        return self._summed(y) if self.mode == "row" else y

    def enter_backward(self, dy: Tensor) -> Tensor:
        """Return dy for this rank's products: gathered along the sequence for a row-parallel layer."""
        return self._gathered(dy) if self.mode == "row" and self.sequence else dy

    def leave_backward(self, dx: Tensor) -> Tensor:
        """Return dx summed over the ranks of a column-parallel layer; dx may be overwritten."""
        return self._summed(dx) if self.mode == "column" else dx

    def _gathered(self, tensor: Tensor) -> Tensor:
        if self.size == 1:
            return tensor
        return gather_along_first_dim(tensor, self.checked_group())[0]

    def _summed(self, tensor: Tensor) -> Tensor:
        if self.size == 1:
            return tensor
        if self.sequence:
            return reduce_scatter_along_first_dim(tensor, self.checked_group())[0]
        return allreduce(tensor, self.checked_group())[0]

    def checked(self) -> TensorParallel:
        """Return self, or raise RuntimeError; a column-parallel forward pass may not communicate and not notice."""
        self.checked_group()
        return self

    def checked_group(self) -> dist_group_type:
        if self.group is None:
            raise RuntimeError(
                f"tp_size={self.size} and no tensor-parallel group; call set_tensor_parallel_group(group) before the "
                "forward pass, or construct the layer with tp_group=group"
            )
        return self.group


def tensor_parallel_size(tp_group: dist_group_type | None, tp_size: int) -> int:
    """Return how many ranks share a layer: the group's size if there is one, otherwise tp_size.

    A tp_size that differs from the group's has no effect, which is warned about once.

    Raises:
        ValueError: This rank does not belong to the group.
    """
    if tp_group is None:
        return tp_size
    ranks = world_size(tp_group)
    if ranks < 1:
        raise ValueError(
            "this rank does not belong to tp_group; give the tensor-parallel group of this rank"
        )
    if tp_size not in (1, ranks):
        warn_once(
            "tp_size",
            f"tp_size={tp_size} has no effect: tp_group has {ranks} ranks, over which the layer is sharded. Leave "
            "tp_size out, or give the number of ranks of the group",
        )
    return ranks


def check_tensor_parallel_group(tp_group: dist_group_type, tp_size: int, kind: str) -> None:
    """Raise ValueError unless a sharded layer can use a tensor-parallel group.

    Args:
        tp_group: The group.
        tp_size: Rank count that the parameters are sharded over.
        kind: The layer's class name.
    """
    ranks = world_size(tp_group)
    if ranks != tp_size:
        raise ValueError(
            f"the parameters of {kind} are sharded over tp_size={tp_size} ranks, the tensor-parallel group has "
            f"{max(ranks, 0)}; give a group of {tp_size} ranks, or construct the layer with tp_size={max(ranks, 1)}"
        )


def set_tensor_model_parallel_attributes(
    tensor: Tensor, is_parallel: bool, dim: int, stride: int
) -> None:
    """Mark a parameter with the axis that it is sharded along, under the attribute names that Megatron-LM reads.

    Args:
        tensor: The parameter.
        is_parallel: The parameter is a shard.
        dim: Sharded dimension.
        stride: Shard stride.

    Raises:
        ValueError: The parameter has another mark already; the same mark again changes nothing.
    """
    checks.tensor("tensor", tensor)
    marks = {
        "tensor_model_parallel": to_bool("is_parallel", is_parallel),
        "partition_dim": to_int("dim", dim),
        "partition_stride": to_int("stride", stride, 1),
    }
    for name, value in marks.items():
        current = getattr(tensor, name, value)
        if current != value:
            raise ValueError(
                f"the tensor is marked with {name}={current} already, which {name}={value} contradicts; "
                "mark it once, or delete the attribute first"
            )
    for name, value in marks.items():
        setattr(tensor, name, value)


def initialize_affine_weight_gpu(
    weight: Tensor,
    init_method: Callable[[Tensor], object],
    get_rng_state_tracker: Callable[[], CudaRNGStatesTracker] | None = None,
    partition_dim: int = 0,
    stride: int = 1,
    set_tp_attributes: bool = True,
) -> None:
    """Call init_method(weight) with the tracker's tensor-parallel random state, if there is a tracker.

    Args:
        weight: Weight to fill in place, without gradients.
        init_method: `init_method(weight)` fills the weight.
        get_rng_state_tracker: Function that returns the random state tracker.
        partition_dim: Sharded dimension, which set_tp_attributes records on the weight.
        stride: Shard stride, which set_tp_attributes records on the weight.
        set_tp_attributes: Record the attributes as `set_tensor_model_parallel_attributes` does.
    """
    checks.tensor("weight", weight)
    function("init_method", init_method)
    function_or_none("get_rng_state_tracker", get_rng_state_tracker)
    partition_dim, stride = to_int("partition_dim", partition_dim), to_int("stride", stride, 1)
    if to_bool("set_tp_attributes", set_tp_attributes):
        set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    with (
        torch.no_grad(),
        nullcontext() if get_rng_state_tracker is None else get_rng_state_tracker().fork(),
    ):
        init_method(weight)
