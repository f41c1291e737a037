"""multi_tensor_applier(op, noop_flag, tensor_lists, *args) = op(chunk_size, noop_flag, tensor_lists, *args)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...common.numbers import to_int
from .local import local_of

__all__ = ["MultiTensorApply", "multi_tensor_applier"]

_PLAIN = {Tensor, torch.nn.Parameter}


class MultiTensorApply:
    """Calls an operation on lists with what a rank holds: shards of distributed tensors, and no empty ones."""

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
        """Return the result of `op`, None if all tensors are empty; raise RuntimeError for lists of several lengths."""
        lists = worked_on(tensor_lists)
        if not lists or not lists[0]:
            return None
        return op(self.chunk_size, noop_flag_buffer, lists, *args)


class Checked(tuple[Sequence[Tensor], ...]):
    """Parallel lists, and what `worked_on` makes of them, which somebody knows already."""

    worked: list[Sequence[Tensor]]

    @classmethod
    def of(cls, tensor_lists: Sequence[Sequence[Tensor]], worked: list[Sequence[Tensor]]) -> Checked:
        """The lists with what is known of them."""
        made = cls(tensor_lists)
        made.worked = worked
        return made


def worked_on(tensor_lists: Sequence[Sequence[Tensor]]) -> list[Sequence[Tensor]]:
    """What a rank holds of the lists, without empty tensors; RuntimeError for lists of different lengths."""
    if isinstance(tensor_lists, Checked):
        return tensor_lists.worked
    lists = [local_tensors(tensors) for tensors in tensor_lists]
    lengths = [len(tensors) for tensors in lists]
    if len(set(lengths)) > 1:
        raise RuntimeError(f"the lists have {lengths} tensors; give lists of one length")
    if lists and not all(map(Tensor.numel, lists[0])):
        kept = [place for place, tensor in enumerate(lists[0]) if tensor.numel()]
        return [[tensors[place] for place in kept] for tensors in lists]
    return lists


def local_tensors(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """What a rank holds of each tensor."""
    return tensors if set(map(type, tensors)) <= _PLAIN else [local_of(tensor) for tensor in tensors]


multi_tensor_applier = MultiTensorApply(2048 * 32)
