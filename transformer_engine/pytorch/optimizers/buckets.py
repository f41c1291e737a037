"""How the parameters of a group fall into lists of one device and one dtype, which a launch can step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..tensor.quantized_tensor import QuantizedTensor
from .local import local_of
from .repeated import RepeatedAdam


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
    """What the buckets of a group follow from: equal facts, equal buckets.

    grads   the dtype of each parameter's gradient, None where it has none
    """

    params: list[Tensor]
    grads: list[torch.dtype | None]
    master_weights: bool
    decoupled: bool

    @classmethod
    def of(
        cls, params: Sequence[Tensor], grads: Sequence[Tensor | None], master_weights: bool, decoupled: bool
    ) -> Facts:
        """The facts of a group's parameters and their gradients."""
        dtypes = [None if grad is None else grad.dtype for grad in grads]
        return cls(list(params), dtypes, master_weights, decoupled)

    def equal(self, other: Facts) -> bool:
        """The same parameters, not equal ones."""
        return (
            self[1:] == other[1:]
            and len(self.params) == len(other.params)
            and all(map(is_, self.params, other.params))
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
