"""The protocol of weights that a caller shards and gathers, and the functions with which a layer would use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

__all__ = [
    "DistributedWeight",
    "finalize_weight_grads",
    "is_distributed_weight",
    "materialize_weight_for_backward",
    "materialize_weight_for_forward",
]


@runtime_checkable
class DistributedWeight(Protocol):
    """A tensor that represents a shard of a weight and can produce the weights of its group.

    The first weight of a group acts for all of them.

    Attributes:
        is_distributed_weight: True.
    """

    is_distributed_weight: bool

    def materialize_group_for_forward(self) -> Sequence[Tensor]:
        """Return the whole weights of the group for a forward pass."""
        ...

    def materialize_group_for_backward(self) -> Sequence[Tensor]:
        """Return the whole weights of the group for a backward pass."""
        ...

    def finalize_group_grads(self, wgrads: Any) -> Any:
        """Return what autograd receives for gradients of the whole weights: one gradient, or a sequence of them."""
        ...

    def grad_buffer(self) -> Tensor:
        """Return the buffer that receives the gradient of the whole weight."""
        ...


def is_distributed_weight(weight: Any) -> bool:
    """Return whether a value has the flag of a distributed weight.

    Args:
        weight: A parameter of a layer.

    Raises:
        TypeError: The value has the flag and is not a tensor.
    """
    if not getattr(weight, "is_distributed_weight", False):
        return False
    if not isinstance(weight, Tensor):
        raise TypeError(
            f"is_distributed_weight is set on a {type(weight).__name__}; set it on a torch.Tensor, the shard"
        )
    return True


def materialize_weight_for_forward(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the whole weights of a group for a forward pass; plain weights are returned unchanged.

    Args:
        weights: Weights of one group, such as those of a `GroupedLinear`.

    Raises:
        ValueError: The group returns another number of weights.
    """
    return _materialized(weights, "materialize_group_for_forward")


def materialize_weight_for_backward(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the whole weights of a group for a backward pass; see `materialize_weight_for_forward`."""
    return _materialized(weights, "materialize_group_for_backward")


def _materialized(weights: Sequence[Tensor], method: str) -> list[Tensor]:
    if not weights or not is_distributed_weight(weights[0]):
        return list(weights)
    whole = list(getattr(weights[0], method)())
    if len(whole) != len(weights):
        raise ValueError(
            f"{method} of {type(weights[0]).__name__} returned {len(whole)} weights; return {len(weights)}, one for "
            "each weight of the group"
        )
    return whole


def finalize_weight_grads(weights: Sequence[Tensor], wgrads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return what autograd receives for the gradients of whole weights; those of plain weights are unchanged.

    Args:
        weights: Weights of one group.
        wgrads: Gradient of each whole weight. A single gradient is passed to the group without a list.

    Raises:
        ValueError: The numbers of weights and gradients differ.
    """
    if len(weights) != len(wgrads):
        raise ValueError(f"{len(weights)} weights and {len(wgrads)} gradients; give one for each weight")
    leader: Any = weights[0] if weights else None
    if leader is None or not is_distributed_weight(leader):
        return list(wgrads)
    made = leader.finalize_group_grads(wgrads[0] if len(wgrads) == 1 else list(wgrads))
    return list(made) if isinstance(made, (tuple, list)) else [made]
