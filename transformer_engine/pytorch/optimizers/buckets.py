"""How the parameters of a group fall into lists of one device and one dtype, which a launch can step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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


class Layout(NamedTuple):
    """The buckets of a group, and the facts that decide them."""

    facts: tuple[Any, ...]
    buckets: list[Bucket]


def facts_of(params: Sequence[Tensor], grads: Sequence[Tensor | None], *more: Any) -> tuple[Any, ...]:
    """What buckets follow from: equal facts, equal buckets."""
    return (*more, *map(id, params), *[None if grad is None else grad.dtype for grad in grads])


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
