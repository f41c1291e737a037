"""A step of Adam on lists that come again and again: what was checked stays so while they are the same tensors."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

from torch import Tensor
from torch.autograd.graph import increment_version

from ...common.steps import Adam
from ..functions.multi_tensor import adam_checked
from ..primitives.multi_tensor import Extents, adam_step
from .multi_tensor_apply import Checked, local_tensors, worked_on


class RepeatedAdam:
    """An `op` for `multi_tensor_applier`: (chunk_size, flag, lists, rates, how, skips); skips: heed the flag.

    The lists of every call have passed `check`, all of a step before the first of them is stepped.

    Of a thousand tensors the host has a microsecond each. Parameters and states that are the very tensors of the last
    call have their dtypes and extents still, and what a rank holds of them is the same. Gradients may have been made
    anew; those that autograd holds (`.grad`) are on the parameter's device, of its shape, which torch sees to.

    held   the gradients are autograd's, of one dtype, which the caller sees to
    """

    def __init__(self, held: bool) -> None:
        self.held = held
        self.known: list[Sequence[Tensor]] = []
        self.places: list[int] | None = None
        self.work: list[Sequence[Tensor]] = []
        self.extents = Extents(())

    def check(self, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]]) -> Checked:
        """The lists, states as they are kept; ValueError or TypeError where they cannot be stepped."""
        grads, *others = tensor_lists
        local = local_tensors(grads)
        if not (self._are_known(others) and self.held and all(map(Tensor.is_contiguous, local))):
            lists = worked_on(tensor_lists)
            adam_checked(noop_flag, lists)
            sizes = map(Tensor.numel, local)
            places = [place for place, size in enumerate(sizes) if size]
            self.places = None if len(places) == len(local) else places
            self.known = [list(tensors) for tensors in others]
            self.work = lists[1:]
            self.extents = Extents(map(Tensor.numel, lists[1]))
        worked = local if self.places is None else [local[place] for place in self.places]
        return Checked.of(tensor_lists, [worked, *self.work])

    def __call__(
        self,
        chunk_size: int,
        noop_flag: Tensor,
        tensor_lists: Sequence[Sequence[Tensor]],
        rates: Tensor,
        how: Adam,
        skips: bool,
    ) -> None:
        adam_step(tensor_lists, rates, how, noop_flag if skips else None, self.extents)
        increment_version(list(tensor_lists[1]))

    def _are_known(self, others: Sequence[Sequence[Tensor]]) -> bool:
        return len(others) == len(self.known) and all(
            len(ours) == len(theirs) and all(map(is_, ours, theirs))
            for ours, theirs in zip(others, self.known, strict=True)
        )
