"""Protocol for weights that a caller shards and gathers, and the functions with which layers use them.

A layer reads the whole weights inside `whole_weights`. Whole-weight gradients go to
`finalize_group_grads`, and autograd receives its results as the shard gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..common.numbers import with_article
from .runtime.autograd import Function
from .runtime.double_backward import once_differentiable

__all__ = [
    "DistributedWeight",
    "finalize_weight_grads",
    "is_distributed_weight",
    "materialize_weight_for_backward",
    "materialize_weight_for_forward",
]


@runtime_checkable
class DistributedWeight(Protocol):
    """A tensor that represents a weight shard and can produce the weights of its group.

    `Linear`, `LayerNormLinear`, `LayerNormMLP`, `GroupedLinear`, `te.ops.BasicLinear` and `te.ops.GroupedLinear`
    accept one as a weight. All weights in a `GroupedLinear` are one group, and so are the `parameters_split`
    pieces; each weight in a `LayerNormMLP` is a group. The first weight in a group acts for all.

    Attributes:
        is_distributed_weight: True.
    """

    is_distributed_weight: bool

    def materialize_group_for_forward(self) -> Tensor | Sequence[Tensor]:
        """Return the whole weights of the group for a forward pass; one weight may be returned without a list."""
        ...

    def materialize_group_for_backward(self) -> Tensor | Sequence[Tensor]:
        """Return the whole weights of the group for a backward pass, with the forward-pass values."""
        ...

    def finalize_group_grads(self, wgrads: Any) -> Any:
        """Return the shard gradients for autograd, from the whole-weight gradients.

        Args:
            wgrads: Gradient of the only weight, or a list with the gradients of a group. None for a
                weight without one, such as a frozen weight.

        Returns:
            A gradient with a shard's shape or None, for each weight; one may be returned without a list.
        """
        ...

    def grad_buffer(self) -> Tensor:
        """Return the buffer that receives the gradient of the whole weight under `fuse_wgrad_accumulation`."""
        ...


def is_distributed_weight(weight: Any) -> bool:
    """Return whether a value has the flag of a distributed weight.

    Args:
        weight: A layer parameter.

    Raises:
        TypeError: The value has the flag and is not a tensor.
    """
    if not getattr(weight, "is_distributed_weight", False):
        return False
    if not isinstance(weight, Tensor):
        raise TypeError(
            f"is_distributed_weight is set on {with_article(type(weight))}; set it on a torch.Tensor, the shard"
        )
    return True


def materialize_weight_for_forward(weights: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Return the whole weights of a group for a forward pass; plain weights are returned unchanged.

    Args:
        weights: One weight, or the weights of one group, such as a `GroupedLinear`.

    Raises:
        ValueError: The group returns another weight count.
    """
    return _materialize(weights, "materialize_group_for_forward")


def materialize_weight_for_backward(weights: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Return the whole weights of a group for a backward pass; see `materialize_weight_for_forward`."""
    return _materialize(weights, "materialize_group_for_backward")


def _materialize(weights: Tensor | Sequence[Tensor], method: str) -> list[Tensor]:
    weights = [weights] if isinstance(weights, Tensor) else weights
    if not weights or not is_distributed_weight(weights[0]):
        return list(weights)
    materialized = getattr(weights[0], method)()
    full = [materialized] if isinstance(materialized, Tensor) else list(materialized)
    if len(full) != len(weights):
        raise ValueError(
            f"{method} of {type(weights[0]).__name__} returned {len(full)} weights; return {len(weights)}, one for "
            "each weight of the group"
        )
    return full


def finalize_weight_grads(
    weights: Tensor | Sequence[Tensor], wgrads: Tensor | Sequence[Tensor | None] | None
) -> list[Tensor | None]:
    """Return what autograd receives for whole-weight gradients; gradients of plain weights are unchanged.

    Args:
        weights: One weight, or the weights of one group.
        wgrads: Gradient per whole weight. A single gradient is passed to the group without a list.

    Raises:
        ValueError: Weight and gradient counts differ, or the group returns another gradient count.
    """
    weights = [weights] if isinstance(weights, Tensor) else weights
    wgrads = [wgrads] if wgrads is None or isinstance(wgrads, Tensor) else wgrads
    if len(weights) != len(wgrads):
        raise ValueError(
            f"{len(weights)} weights and {len(wgrads)} gradients; give one for each weight"
        )
    leader: Any = weights[0] if weights else None
    if leader is None or not is_distributed_weight(leader):
        return list(wgrads)
    results = leader.finalize_group_grads(wgrads[0] if len(wgrads) == 1 else list(wgrads))
    finalized = list(results) if isinstance(results, (tuple, list)) else [results]
    if len(finalized) != len(weights):
        raise ValueError(
            f"finalize_group_grads of {type(leader).__name__} returned {len(finalized)} gradients; return "
            f"{len(weights)}, one for each weight of the group, None for a weight without one"
        )
    return finalized


class ShardGroup(NamedTuple):
    """Weights of a group, and the row count of each whole weight."""

    weights: Sequence[Tensor]
    rows: Sequence[int]


def finalize_delayed_grads(
    groups: Sequence[ShardGroup], delayed: Sequence[tuple[Sequence[Tensor], Tensor]]
) -> None:
    """Finalize whole-weight gradients that `backward_dw` computed, and add the results to the shards' .grad.

    Args:
        groups: The groups of a layer. A group without gradients is not finalized.
        delayed: For each product the weights that are joined along its rows, and the gradient of the whole.
    """
    rows = {
        id(weight): count
        for group in groups
        for weight, count in zip(group.weights, group.rows, strict=True)
    }
    full_weights: dict[int, Tensor] = {}
    for weights, gradient in delayed:
        parts = (
            gradient.split([rows[id(weight)] for weight in weights])
            if len(weights) > 1
            else (gradient,)
        )
        full_weights |= {
            id(weight): part
            for weight, part in zip(weights, parts, strict=True)
            if weight.requires_grad
        }
    for group in groups:
        gradients = [full_weights.get(id(weight)) for weight in group.weights]
        if all(gradient is None for gradient in gradients):
            continue
        for weight, part in zip(
            group.weights, finalize_weight_grads(group.weights, gradients), strict=True
        ):
            if part is not None:
                weight.grad = part if weight.grad is None else weight.grad + part


class _Gather(Function):
    """Materializes the whole weights of shards; the backward pass calls `finalize_group_grads` of their group.

    With delayed gradients, the backward pass returns no gradients, and `finalize_delayed_grads` calls it later.
    """

    @staticmethod
    def forward(ctx: Any, fused: bool, delayed: bool, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.fused, ctx.delayed, ctx.shards = fused, delayed, shards
        ctx.set_materialize_grads(False)
        full_weights = tuple(materialize_weight_for_forward(shards))
        frozen = [
            full
            for full, needs_gradient in zip(full_weights, ctx.needs_input_grad[2:], strict=True)
            if not needs_gradient
        ]
        # Without this mark, layers would compute gradients for frozen weights in the group.
        ctx.mark_non_differentiable(*frozen)
        return full_weights

    @staticmethod
    @once_differentiable("a layer with distributed weights")
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        gradients: list[Tensor | None] = list(grads)
        if ctx.delayed:
            return None, None, *[None for _ in grads]
        if ctx.fused:  # the product has written the buffer
            needs_gradient = ctx.needs_input_grad[2:]
            gradients = [
                shard.grad_buffer() if needs_gradient[i] else None
                for i, shard in enumerate(ctx.shards)
            ]
        return None, None, *finalize_weight_grads(ctx.shards, gradients)


class _Rematerialization:
    """Hooks on saved tensors that drop whole weights and materialize them again for the backward pass.

    Args:
        groups: The shards of each group.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]]) -> None:
        self._groups = groups
        # {(address, element count): place}; a place is (group index, index in the group). The
        # caller keeps the weights alive, so that no other tensor gets their addresses.
        self._places: dict[tuple[int, int], tuple[int, int]] = {}
        self._dropped: set[tuple[int, int]] = set()  # places of the weights that were saved
        self._materialized: dict[tuple[int, int], Tensor] = {}

    def add(self, group: int, full_weights: Sequence[Tensor]) -> None:
        """Register the whole weights of a group, which `pack` then drops."""
        for i, full in enumerate(full_weights):
            if type(full) is Tensor and full.numel() and full.is_contiguous():
                self._places[full.data_ptr(), full.numel()] = group, i

    def pack(self, tensor: Tensor) -> Any:
        """Return a saved tensor, or the place and layout of a whole weight."""
        plain = type(tensor) is Tensor and tensor.layout is torch.strided
        position = self._places.get((tensor.data_ptr(), tensor.numel())) if plain else None
        if position is None:
            return tensor
        self._dropped.add(position)
        return position, tensor.shape, tensor.stride()

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor that `pack` received; a whole weight is materialized again."""
        if isinstance(packed, Tensor):
            return packed
        position, shape, stride = packed
        if position not in self._materialized:  # one call materializes all weights in the group
            full_weights = materialize_weight_for_backward(self._groups[position[0]])
            for group, i in self._dropped:
                if group == position[0]:
                    self._materialized[group, i] = full_weights[i].detach().contiguous()
        full = self._materialized.pop(position)
        return full.as_strided(shape, stride, full.storage_offset())


@contextmanager
def whole_weights(
    groups: Sequence[Sequence[Tensor]], fused: bool, store: Any
) -> Iterator[list[Tensor]]:
    """Yield the whole weights of all groups, differentiable with respect to the shards.

    A whole weight that is saved for the backward pass inside the context is dropped, and materialized again when the
    backward pass reads it. If the caller has hooks on saved tensors (offload, checkpoint), the whole weight goes to
    these hooks instead.

    Args:
        groups: Weights per group; a plain weight group is yielded unchanged.
        fused: Weight gradients are accumulated into `grad_buffer()`.
        store: Delayed weight gradient queue, which receives the groups, or None.

    Raises:
        NotImplementedError: A compiler is tracing.
    """
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "torch.compile with a distributed weight, whose gradient is finalized in an eager backward pass; call the "
            "layer in eager mode"
        )
    hooks = _Rematerialization(groups)
    full_weights: list[Any] = []
    sharded: list[ShardGroup] = []
    for group, shards in enumerate(groups):
        materialized: Any = shards
        if is_distributed_weight(shards[0]):
            materialized = _Gather.apply(fused, store is not None, *shards)
            hooks.add(group, materialized)
            sharded.append(ShardGroup(shards, [full.shape[0] for full in materialized]))
        full_weights += materialized
    if store is not None:
        store.shards = sharded
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:  # pyright: ignore
        yield full_weights
        return
    with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
        yield full_weights
