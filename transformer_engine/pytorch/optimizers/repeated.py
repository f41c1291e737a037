"""A step of Adam on lists that come again and again: what was checked stays so while they are the same tensors."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

from torch import Tensor
from torch.autograd.graph import increment_version

from ...common.steps import Adam
from ..functions.multi_tensor import adam_checked
from ..primitives.multi_tensor import adam_step
from .multi_tensor_apply import worked_on


class RepeatedAdam:
    """An `op` for `multi_tensor_applier`: (chunk_size, flag, lists, rates, how, skips); skips: heed the flag.

    The lists of every call have passed `check`, all of a step before the first of them is stepped.

    Of a thousand tensors the host has a microsecond each. Parameters and states that are the very tensors of the last
    call have their dtypes and extents still. Gradients may have been made anew; those that autograd holds (`.grad`)
    are on the parameter's device, of its shape, which torch sees to.

    held   the gradients are autograd's, of one dtype, which the caller sees to
    """

    def __init__(self, held: bool) -> None:
        self.held = held
        self.known: list[Sequence[Tensor]] = []
        self.sizes: tuple[int, ...] = ()

    def check(self, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]]) -> None:
        """ValueError or TypeError unless the lists can be stepped, states as they are kept; nothing is changed."""
        lists = worked_on(tensor_lists)
        if not self._are_known(lists):
            adam_checked(noop_flag, lists)
            self.known = [list(tensors) for tensors in lists[1:]]
            self.sizes = tuple(map(Tensor.numel, lists[1]))

    def __call__(
        self,
        chunk_size: int,
        noop_flag: Tensor,
        tensor_lists: Sequence[Sequence[Tensor]],
        rates: Tensor,
        how: Adam,
        skips: bool,
    ) -> None:
        adam_step(tensor_lists, rates, how, noop_flag if skips else None, self.sizes)
        increment_version(list(tensor_lists[1]))

    def _are_known(self, lists: Sequence[Sequence[Tensor]]) -> bool:
        grads, *others = lists
        if len(others) != len(self.known) or len(grads) != len(self.sizes):
            return False
        if not all(
            len(ours) == len(theirs) and all(map(is_, ours, theirs))
            for ours, theirs in zip(others, self.known, strict=True)
        ):
            return False
        return self.held and all(map(Tensor.is_contiguous, grads))
