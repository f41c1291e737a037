"""multi_tensor_applier(op, noop_flag, tensor_lists, *args) = op(chunk_size, noop_flag, tensor_lists, *args)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...common.numbers import to_int
from ..runtime.checks import is_distributed
from ..tensor.grouped_tensor import group_memory

_PLAIN = {Tensor, torch.nn.Parameter}
_MODULE = "torch.distributed.tensor"


def local_part(tensor: Tensor) -> Tensor:
    """Shard of a DTensor on this rank, memory of a plain matrix group; any other tensor itself."""
    return tensor._local_tensor if is_distributed(tensor) else group_memory(tensor)  # pyright: ignore[reportAttributeAccessIssue]


def like(parameter: Tensor, local: Tensor) -> Tensor:
    """Return a tensor that is distributed like the parameter, from the local tensor on this rank."""
    if not is_distributed(parameter):
        return local
    placed: Any = parameter
    where = {"run_check": False, "shape": placed.shape, "stride": placed.stride()}
    return sys.modules[_MODULE].DTensor.from_local(
        local, placed.device_mesh, placed.placements, **where
    )


__all__ = ["MultiTensorApply", "multi_tensor_applier"]


class MultiTensorApply:
    """Call an operation on local tensor lists: distributed tensors' shards, without empty ones.

    Args:
        chunk_size: Passed to the operation, where it has no effect.
    """

    available = True
    warned = False

    def __init__(self, chunk_size: int):
        self.chunk_size = to_int("chunk_size", chunk_size, 1)

    def __call__(
        self,
        op: Callable[..., Any],
        noop_flag_buffer: Tensor,
        tensor_lists: Sequence[Sequence[Tensor]],
        *args: Any,
    ) -> Any:
        """Return `op`'s result, None if all tensors are empty; raise RuntimeError for lists with different lengths.

        Args:
            op: Function with arguments (chunk_size, noop_flag, tensor_lists, *args), such as `multi_tensor_adam`.
            noop_flag_buffer: The operation's flag, int32 [1].
            tensor_lists: Parallel tensor lists; DTensors are replaced by their local shards.
            args: The operation's other arguments.
        """
        lists = choose_tensors(tensor_lists)
        if not lists or not lists[0]:
            return None
        return op(self.chunk_size, noop_flag_buffer, lists, *args)


class Checked(tuple[Sequence[Tensor], ...]):
    """Parallel lists with the cached result of `choose_tensors`."""

    worked: list[Sequence[Tensor]]


def choose_tensors(tensor_lists: Sequence[Sequence[Tensor]]) -> list[Sequence[Tensor]]:
    """Return the local tensors in the lists without empty ones; raise RuntimeError for lists with different lengths."""
    if isinstance(tensor_lists, Checked):
        return tensor_lists.worked
    lists = [local_tensors(tensors) for tensors in tensor_lists]
    lengths = [len(tensors) for tensors in lists]
    if len(set(lengths)) > 1:
        raise RuntimeError(f"the lists have {lengths} tensors; give lists of one length")
    if lists and not all(map(Tensor.numel, lists[0])):
        nonempty = [index for index, tensor in enumerate(lists[0]) if tensor.numel()]
        return [[tensors[index] for index in nonempty] for tensors in lists]
    return lists


def local_tensors(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the local tensor of each tensor."""
    return (
        tensors if set(map(type, tensors)) <= _PLAIN else [local_part(tensor) for tensor in tensors]
    )


multi_tensor_applier = MultiTensorApply(2048 * 32)
"""Return the result of `op` on the local tensors in the lists, without empty tensors; None if all tensors are empty.

Lists with different lengths raise RuntimeError.
"""
