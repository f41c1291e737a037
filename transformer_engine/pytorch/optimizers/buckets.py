"""How the parameters of a group fall into lists of one device and one dtype, which a launch can step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..tensor.quantized_tensor import QuantizedTensor
from .local import local_of
from .multi_tensor_apply import local_tensors
from .repeated import RepeatedAdam

_DESCRIPTIONS: tuple[Callable[[Tensor], Any], ...] = (
    Tensor.numel,
    attrgetter("dtype"),
    attrgetter("device"),
    Tensor.is_contiguous,
)


class Bucket(NamedTuple):
    """Parameters of a group that one launch steps.

    members     their places in the group
    params      as the group holds them
    parameters  what a rank holds of them
    quantized   they are written from numbers that are stepped in their place
    own         float32 parameters, their own masters
    states      of each parameter
    step        what is known of their lists
    """

    members: tuple[int, ...]
    params: list[Tensor]
    parameters: list[Tensor]
    quantized: bool
    own: bool
    states: list[dict[str, Tensor]]
    step: RepeatedAdam


class Facts(NamedTuple):
    """Everything that the buckets of a group depend on: equal facts, equal buckets.

    A caller can replace `parameter.data` by a tensor of another size, dtype, layout or device, and the local tensor of
    a distributed parameter by another one. Neither changes the identity of the parameter, so every step compares them.

    params      as the group holds them, compared by identity
    local       what this rank holds of each, compared by identity
    described   sizes, dtypes, devices and contiguity of the local tensors, and with master weights their addresses:
                a float32 parameter is its own master, so that the master is an alias of its memory
    grads       the dtype of each parameter's gradient, None without one
    """

    params: list[Tensor]
    local: list[Tensor]
    described: tuple[list[Any], ...]
    grads: list[torch.dtype | None]
    master_weights: bool
    decoupled: bool

    @classmethod
    def of(
        cls, params: Sequence[Tensor], grads: Sequence[Tensor | None], master_weights: bool, decoupled: bool
    ) -> Facts:
        """Return the facts of a group's parameters and their gradients."""
        local = local_tensors(params)
        attributes = (*_DESCRIPTIONS, Tensor.data_ptr) if master_weights else _DESCRIPTIONS
        described = tuple([list(map(attribute, local)) for attribute in attributes])
        dtypes = [None if grad is None else grad.dtype for grad in grads]
        return cls(list(params), list(local), described, dtypes, master_weights, decoupled)

    def equal(self, other: Facts) -> bool:
        """Return whether both are of the same tensors, in the same state."""
        return (
            self[2:] == other[2:]
            and len(self.params) == len(other.params)
            and all(map(is_, self.params, other.params))
            and all(map(is_, self.local, other.local))
        )


class Layout(NamedTuple):
    """The buckets of a group, and the facts that decide them."""

    facts: Facts
    buckets: list[Bucket]


def buckets_of(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    states: Mapping[Tensor, dict[str, Tensor]],
    keeps_remainder: Callable[[Tensor], bool],
    held: bool,
) -> list[Bucket]:
    """Parameters that have gradients, together where device, dtypes and states are alike; held: see RepeatedAdam."""
    members: dict[tuple[Any, ...], list[int]] = {}
    for place, (parameter, grad) in enumerate(zip(params, grads, strict=True)):
        if grad is None:
            continue
        local = local_of(parameter)
        kind = type(local) if isinstance(local, QuantizedTensor) else local.dtype
        members.setdefault((local.device, kind, grad.dtype, keeps_remainder(parameter)), []).append(place)
    return [_bucket(places, [params[place] for place in places], states, held) for places in members.values()]


def _bucket(
    places: Sequence[int], params: list[Tensor], states: Mapping[Tensor, dict[str, Tensor]], held: bool
) -> Bucket:
    parameters = [local_of(parameter) for parameter in params]
    quantized = isinstance(parameters[0], QuantizedTensor)
    own = not quantized and parameters[0].itemsize == 4
    kept = [states[parameter] for parameter in params]
    return Bucket(tuple(places), params, parameters, quantized, own, kept, RepeatedAdam(held))
