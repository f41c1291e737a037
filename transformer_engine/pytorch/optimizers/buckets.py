"""Parameter buckets with one device and dtype, which one launch steps, and their step with cached checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ...common.operation_settings import Adam
from ..primitives.multi_tensor import Extents, adam_step
from ..tensor.quantized_tensor import QuantizedTensor
from .multi_tensor import adam_checked
from .multi_tensor_apply import Checked, choose_tensors, local_part, local_tensors


class CheckedAdamStep:
    """The step of a bucket, an operation for `multi_tensor_applier`: (chunk_size, flag, lists, rates, how, skips).

    Every list has passed `check`, all lists in a step before the first list is stepped.

    Stepping a thousand tensors takes the host about a millisecond. So parameters and states are not
    checked again while they are the same tensors as in the last call. The caller compares size,
    dtype, device and layout of the parameters (`BucketKey`); for states, the addresses are compared
    here, which change where a caller assigns `state.data`. Gradients can be new tensors in every
    step. Autograd guarantees that `.grad` has the shape and device of its parameter.

    Args:
        held: The gradients are `.grad` attributes with one dtype.
        block_scaled: The moments are block-scaled.
    """

    def __init__(self, held: bool, block_scaled: bool) -> None:
        self.held, self.block_scaled = held, block_scaled
        self.known: list[Sequence[Tensor]] = []
        self.addresses: list[list[int]] = []
        self.places: list[int] | None = None
        self.work: list[Sequence[Tensor]] = []
        self.extents = Extents(())

    def check(self, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]]) -> Checked:
        """Return the stored tensor lists; raise ValueError or TypeError if they cannot be stepped."""
        grads, *state_lists = tensor_lists
        local = local_tensors(grads)
        unchanged = len(state_lists) == len(self.known) and all(
            len(ours) == len(theirs) and all(map(is_, ours, theirs))
            for ours, theirs in zip(state_lists, self.known, strict=True)
        )
        unchanged = unchanged and _addresses(state_lists) == self.addresses
        if not (unchanged and self.held and all(map(Tensor.is_contiguous, local))):
            lists = choose_tensors(tensor_lists)
            adam_checked(noop_flag, lists, self.block_scaled)
            sizes = map(Tensor.numel, local)
            places = [index for index, size in enumerate(sizes) if size]
            self.places = None if len(places) == len(local) else places
            self.known = [list(tensors) for tensors in state_lists]
            self.addresses = _addresses(state_lists)
            self.work = lists[1:]
            self.extents = Extents(map(Tensor.numel, lists[1]))
        worked = local if self.places is None else [local[index] for index in self.places]
        checked = Checked(tensor_lists)
        checked.worked = [worked, *self.work]
        return checked

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


def _addresses(state_lists: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """Return the addresses of the states; the first list is the parameters."""
    return [list(map(Tensor.data_ptr, local_tensors(states))) for states in state_lists[1:]]


_DESCRIPTIONS: tuple[Callable[[Tensor], Any], ...] = (
    Tensor.numel,
    attrgetter("dtype"),
    attrgetter("device"),
    Tensor.is_contiguous,
)


class Bucket(NamedTuple):
    """Parameters in a group that one launch steps.

    Attributes:
        members: Their indices in the group.
        params: The parameters of the group.
        parameters: The local tensors of this rank.
        quantized: The parameters are quantized: float32 numbers are stepped instead, and then quantized.
        own: The parameters are float32, and their own masters.
        states: States per parameter.
        step: The step, with the bucket's list checks.
    """

    members: tuple[int, ...]
    params: list[Tensor]
    parameters: list[Tensor]
    quantized: bool
    own: bool
    states: list[dict[str, Tensor]]
    step: CheckedAdamStep


class BucketKey(NamedTuple):
    """The properties that determine the buckets of a group: equal keys give equal buckets.

    A caller can replace `parameter.data` by a tensor with another size, dtype, layout or device, and a distributed
    parameter's local tensor by another one. Neither changes the parameter's identity, so every step compares them.

    Attributes:
        params: The parameters of the group, compared by identity.
        local: Each local tensor, compared by identity.
        described: Sizes, dtypes, devices and contiguity of the local tensors, and with master weights their addresses:
            a float32 parameter is its own master, so that the master is an alias of its memory.
        grads: Each parameter's gradient dtype; None without a gradient.
        master_weights: Whether there are master weights.
        decoupled: Whether gradients are read from `decoupled_grad`.
    """

    params: list[Tensor]
    local: list[Tensor]
    described: tuple[list[Any], ...]
    grads: list[torch.dtype | None]
    master_weights: bool
    decoupled: bool

    @classmethod
    def of(
        cls,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        master_weights: bool,
        decoupled: bool,
    ) -> BucketKey:
        """Return the key for a group's parameters and their gradients."""
        local = local_tensors(params)
        attributes = (*_DESCRIPTIONS, Tensor.data_ptr) if master_weights else _DESCRIPTIONS
        described = tuple([list(map(attribute, local)) for attribute in attributes])
        dtypes = [None if grad is None else grad.dtype for grad in grads]
        return cls(list(params), list(local), described, dtypes, master_weights, decoupled)

    def equal(self, other: BucketKey) -> bool:
        """Return whether both keys describe the same tensors, in the same state."""
        return (
            self[2:] == other[2:]
            and len(self.params) == len(other.params)
            and all(map(is_, self.params, other.params))
            and all(map(is_, self.local, other.local))
        )


class GroupBuckets(NamedTuple):
    """The buckets of a group, and their key."""

    key: BucketKey
    buckets: list[Bucket]


def group_into_buckets(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    states: Mapping[Tensor, dict[str, Tensor]],
    keeps_remainder: Callable[[Tensor], bool],
    plain_grads: bool,
    block_scaled: bool,
) -> list[Bucket]:
    """Group the parameters that have gradients by device, dtypes and state kind.

    The last two arguments are described in `CheckedAdamStep`.
    """
    members: dict[tuple[Any, ...], list[int]] = {}
    for index, (parameter, grad) in enumerate(zip(params, grads, strict=True)):
        if grad is None:
            continue
        local = local_part(parameter)
        kind = type(local) if isinstance(local, QuantizedTensor) else local.dtype
        members.setdefault((local.device, kind, grad.dtype, keeps_remainder(parameter)), []).append(
            index
        )
    buckets = []
    for places in members.values():
        of_bucket = [params[index] for index in places]
        parameters = [local_part(parameter) for parameter in of_bucket]
        quantized = isinstance(parameters[0], QuantizedTensor)
        is_own_master = not quantized and parameters[0].itemsize == 4
        states_of_bucket = [states[parameter] for parameter in of_bucket]
        step = CheckedAdamStep(plain_grads, block_scaled)
        buckets.append(
            Bucket(
                tuple(places),
                of_bucket,
                parameters,
                quantized,
                is_own_master,
                states_of_bucket,
                step,
            )
        )
    return buckets
