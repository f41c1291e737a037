"""GroupedTensors of consecutive row groups, quantized without reading row counts on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .grouped_tensor import GroupedTensor, StackQuantizer
from .padded_groups import PaddedGroups
from .storage.grouped_layout import COLUMNWISE, ROWWISE, GroupLayout, Offsets, place_members
from .storage.grouped_tensor_storage import GroupedTensorStorage


def quantize_rows(
    x: Tensor, quantizer: Any, first_dims: Tensor, tensor_offsets: Tensor | None = None
) -> GroupedTensor:
    """Quantize consecutive row groups without reading their row counts on the host.

    Args:
        x: Values [total, K].
        quantizer: Quantizer for every group, without a `groups_unsupported_reason`.
        first_dims: Rows per group, integers [n] on the device of x; rows behind the last group are ignored.
        tensor_offsets: First element per group and the end, int64 [n + 1]; computed if missing.

    Returns:
        The group, with the logical shape of x.
    """
    groups = PaddedGroups.of(first_dims, x.shape[0])
    buffers = _flat(quantizer.encode_groups(x, groups))
    if tensor_offsets is None:
        tensor_offsets = groups.starts * x.shape[1]
    layout = GroupLayout(groups.count, tuple(x.shape), (True, False))
    storage = GroupedTensorStorage(
        layout=layout,
        quantizer=StackQuantizer([quantizer.copy() for _ in range(groups.count)]),
        dtype=x.dtype,
        first_dims=first_dims,
        tensor_offsets=tensor_offsets,
        **buffers,
    )
    return GroupedTensor.from_storage(storage)


def quantize_stack(x: Tensor, quantizer: Any) -> GroupedTensor:
    """Quantize matrices x [n, M, K] with one scale each, and keep their maxima and multipliers as `amax` and `scale`.

    Args:
        x: Values.
        quantizer: Delayed or current scaling quantizer.
    """
    count, rows, depth = x.shape
    each = torch.full((count,), rows, dtype=torch.int64, device=x.device)
    groups = PaddedGroups.of(each, count * rows)
    buffers = _flat(quantizer.encode_groups(x.reshape(-1, depth), groups))
    buffers |= {"dtype": x.dtype, "num_tensors": count, "shapes": [(rows, depth)] * count}
    storage = GroupedTensorStorage(quantizer=quantizer, **buffers)
    return GroupedTensor.from_storage(storage)


def quantize_blocks_of_stack(x: Tensor, quantizer: Any) -> GroupedTensor:
    """Quantize matrices x [n, M, K] in blocks; every part of a matrix is contiguous in its buffer.

    Args:
        x: Values.
        quantizer: Quantizer for every matrix, without a `groups_unsupported_reason`.
    """
    count, rows, depth = x.shape
    each = torch.full((count,), rows, dtype=torch.int64, device=x.device)
    groups = PaddedGroups.of(each, count * rows)
    buffers = _flat(quantizer.encode_groups(x.reshape(-1, depth), groups))
    by_name: dict[str, Tensor | None] = {
        f"_{name}" if "amax" in name else name: t for name, t in buffers.items()
    }
    known = {name: by_name.get(name) for name in (*ROWWISE, *COLUMNWISE)}
    members = place_members([(rows, depth)] * count, quantizer, known, x.dtype, Offsets())
    storage = GroupedTensorStorage(
        layout=GroupLayout.of(members),
        quantizer=StackQuantizer([quantizer.copy() for _ in range(count)]),
        dtype=x.dtype,
        **buffers,
    )
    return GroupedTensor.from_storage(storage)


def _flat(buffers: dict[str, Tensor]) -> dict[str, Any]:
    return {
        name: buffer if buffer.dim() == 1 else buffer.reshape(-1)
        for name, buffer in buffers.items()
    }
