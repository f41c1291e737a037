"""Distributed checkpoint reads into a quantized tensor whose saved shards have different rows.

torch.distributed.checkpoint reads a tensor shard by shard, as `tensor.narrow(..).copy_(saved)`. A quantized tensor
cannot be written that way. One scale can belong to all rows, so that each write would quantize the other rows
again, and a shard can end inside a block. `ShardTarget` therefore presents a tensor whose narrowed parts collect
the saved shards. The last shard completes the tensor: its codes and scales are the shards', joined as a gather
joins them. Shards with different scales, or without codes, are decoded, and the whole tensor is quantized.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from .storage.fsdp import gather_payload, join_payload
from .storage.quantized_tensor_storage import QuantizedTensorStorage

aten = torch.ops.aten
Offsets = tuple[int, ...]

# Name of the attribute on the alias that a checkpoint narrows: the tensor into which the shards are read.
READ_TARGET_ATTR = "_reads_shards"
# Name of the attribute on that tensor with the shards that have been read, until all have been.
COLLECTED_SHARDS_ATTR = "_collected_shards"


class ShardTarget(Tensor):
    """Part of a quantized tensor that accepts only `narrow`, `detach` and `copy_`, which collects its argument."""

    _whole: Any
    _offsets: Offsets

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def of(full: Any, offsets: Offsets, shape: Sequence[int]) -> ShardTarget:
        """Return the part of a quantized tensor that begins at these offsets."""
        target = torch.Tensor._make_wrapper_subclass(
            ShardTarget, torch.Size(shape), dtype=full.dtype, device=full.device
        )
        target._whole, target._offsets = full, offsets
        return target

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        part = args[0]
        if func is aten.slice.Tensor and isinstance(part, ShardTarget):
            return narrow_part(part, part._whole, part._offsets, *args[1:], **(kwargs or {}))
        if func in (aten.detach.default, aten.alias.default):
            return ShardTarget.of(part._whole, part._offsets, part.shape)
        if func is aten.copy_.default and isinstance(part, ShardTarget):
            collect(part._whole, part._offsets, args[1])
            return part
        raise NotImplementedError(
            f"{func} on a part of a quantized tensor that a distributed checkpoint is read into; the part accepts "
            "narrow, detach and copy_; load the checkpoint first, then use the tensor"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"ShardTarget(offsets={self._offsets}, shape={tuple(self.shape)}, of={type(self._whole).__name__})"


def narrow_part(
    part: Tensor,
    full: Any,
    offsets: Offsets,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> ShardTarget:
    """Return part[start:end] along a dimension; part begins at these offsets of the whole tensor."""
    if step != 1:
        raise NotImplementedError(
            f"step={step} in a read of a distributed checkpoint; shards are contiguous runs"
        )
    dim %= part.dim()
    first, stop, _ = slice(start, end).indices(part.shape[dim])
    shifted = (*offsets[:dim], offsets[dim] + first, *offsets[dim + 1 :])
    return ShardTarget.of(
        full, shifted, (*part.shape[:dim], max(stop - first, 0), *part.shape[dim + 1 :])
    )


def collect(full: Any, offsets: Offsets, source: Tensor) -> None:
    """Collect a saved shard; write the tensor once the collected shards cover it."""
    shards: dict[Offsets, Tensor] = vars(full).setdefault(COLLECTED_SHARDS_ATTR, {})
    shards[offsets] = source.detach().clone()
    if sum(shard.numel() for shard in shards.values()) < full.numel():
        return
    delattr(full, COLLECTED_SHARDS_ATTR)
    storage = _join_shards(full, shards)
    with torch.no_grad():
        if storage is not None:
            full.copy_(type(full).from_storage(storage))
            return
        # float32 holds code times scale with the least rounding.
        quantized = any(isinstance(shard, QuantizedTensorStorage) for shard in shards.values())
        dtype = torch.float32 if quantized else next(iter(shards.values())).dtype
        values = torch.empty(full.shape, dtype=dtype, device=full.device)
        for place, shard in shards.items():
            window = values
            for dim, (start, size) in enumerate(zip(place, shard.shape, strict=True)):
                window = window.narrow(dim, start, size)
            window.copy_(
                shard.decode(torch.float32) if isinstance(shard, QuantizedTensorStorage) else shard
            )
        full.copy_(values)


def _join_shards(full: Any, shards: dict[Offsets, Tensor]) -> QuantizedTensorStorage | None:
    """Return the joined payload if shards are quantized rows with equal whole-tensor scales; None for other shards."""
    ordered = [(offsets, shards[offsets]) for offsets in sorted(shards)]
    first: Any = ordered[0][1]
    sent, payloads, row = [], [], 0
    for offsets, shard in ordered:
        if (
            not isinstance(shard, QuantizedTensorStorage)
            or shard.shape[1:] != full.shape[1:]
            or offsets[0] != row
        ):
            return None
        if (
            shard.storage_class() is not full.storage_class()
            or shard.byte_layout() != full.byte_layout()
        ):
            return None
        if shard.get_usages() != first.get_usages():
            return None
        row += shard.shape[0]
        rows = shard.shape[0] * prod(shard.shape[1:-1])
        if row != full.shape[0] and rows % shard.row_granularity():
            return None  # the block of the last rows continues in the next shard
        tensors, payload = gather_payload(shard)
        sent.append(tensors)
        payloads.append(payload)
    whole_parts = payloads[0].whole
    for payload in payloads[1:]:
        if any(not torch.equal(part, payload.whole[name]) for name, part in whole_parts.items()):
            return None
    joined = join_payload(
        [torch.cat(parts) for parts in zip(*sent, strict=True)], payloads[0], full.dtype
    )
    for _, shard in ordered:
        joined.join_claims(shard)  # pyright: ignore[reportArgumentType]
    return joined
