"""A repeated step of Adam: the checks of a list of tensors hold while the tensors and their memory are the same."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

from torch import Tensor
from torch.autograd.graph import increment_version

from ...common.operation_settings import Adam
from ..functions.multi_tensor import adam_checked
from ..primitives.multi_tensor import Extents, adam_step
from .multi_tensor_apply import Checked, local_tensors, worked_on


class RepeatedAdam:
    """An operation for `multi_tensor_applier`: (chunk_size, flag, lists, rates, how, skips).

    Every list has passed `check`, all lists of a step before the first of them is stepped.

    A step of a thousand tensors takes the host about a millisecond. So parameters and states are not checked again
    while they are the same tensors as in the last call. The caller compares size, dtype, device and layout of the
    parameters (`buckets.Facts`); of the states, the addresses are compared here, which change where a caller assigns
    `state.data`. Gradients can be new tensors in every step. Autograd guarantees that `.grad` has the shape and the
    device of its parameter.

    Args:
        held: The gradients are `.grad` attributes, of one dtype.
    """

    def __init__(self, held: bool) -> None:
        self.held = held
        self.known: list[Sequence[Tensor]] = []
        self.addresses: list[list[int]] = []
        self.places: list[int] | None = None
        self.work: list[Sequence[Tensor]] = []
        self.extents = Extents(())

    def check(self, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]]) -> Checked:
        """Return the lists of stored tensors; raise ValueError or TypeError if they cannot be stepped."""
        grads, *others = tensor_lists
        local = local_tensors(grads)
        if not (self._are_known(others) and self.held and all(map(Tensor.is_contiguous, local))):
            lists = worked_on(tensor_lists)
            adam_checked(noop_flag, lists)
            sizes = map(Tensor.numel, local)
            places = [place for place, size in enumerate(sizes) if size]
            self.places = None if len(places) == len(local) else places
            self.known = [list(tensors) for tensors in others]
            self.addresses = _addresses(others)
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
        same = len(others) == len(self.known) and all(
            len(ours) == len(theirs) and all(map(is_, ours, theirs))
            for ours, theirs in zip(others, self.known, strict=True)
        )
        return same and _addresses(others) == self.addresses


def _addresses(others: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """Return where the states begin in memory; the first list is the parameters."""
    return [list(map(Tensor.data_ptr, local_tensors(states))) for states in others[1:]]
