"""Distributed weights in a chain: their places among the tensors of a call, and checks for their operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..distributed_weight import is_distributed_weight
from .operation import BasicOperation


class ShardPlaces(NamedTuple):
    """The places of distributed weights among the tensors of a call: the input, then the tensors per operation.

    Attributes:
        groups: Places of the distributed weights per operation that has any.
        fused: Weight gradients are accumulated into buffers.
    """

    groups: tuple[tuple[int, ...], ...] = ()
    fused: bool = False


def places_of_shards(ops: Sequence[BasicOperation]) -> ShardPlaces:
    """Return the places of the distributed weights in a chain.

    Raises:
        NotImplementedError: An operation does not accept distributed weights, or their gradients have different
            destinations.
    """
    groups: list[tuple[int, ...]] = []
    accumulate: set[bool] = set()
    position = 1
    for op in ops:
        names = getattr(op, "parameter_names", None) or [
            name for name, _ in op.named_parameters(recurse=False)
        ]
        parameters = [(name, getattr(op, name)) for name in names if getattr(op, name) is not None]
        shards = [
            i for i, (_, parameter) in enumerate(parameters) if is_distributed_weight(parameter)
        ]
        other_names = [
            parameters[i][0] for i in shards if not parameters[i][0].startswith("weight")
        ]
        reason = op.distributed_weight_unsupported_reason() if shards else None
        if reason is None and other_names:
            reason = f"leave {other_names[0]} whole"
        if reason is not None:
            raise NotImplementedError(
                f"{type(op).__name__} does not accept the distributed weight "
                f"{type(parameters[shards[0]][1]).__name__}: {reason}"
            )
        if shards:
            groups.append(tuple([position + i for i in shards]))
            accumulate.add(bool(getattr(op, "_accumulate_into_main_grad", False)))
        position += len(parameters) + op.num_extra_inputs
    if len(accumulate) > 1:
        raise NotImplementedError(
            "operations with distributed weights differ in accumulate_into_main_grad; give all of them the same value"
        )
    return ShardPlaces(tuple(groups), True in accumulate)
