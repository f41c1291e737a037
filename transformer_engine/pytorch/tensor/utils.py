"""Distributed optimizer functions for quantized weights: replace buffers, and write weights from masters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .float8_tensor import Float8Tensor
from .initial_values import forget_initial_values
from .master_weights import Shard, write_shards
from .quantized_tensor import QuantizedTensor
from .row_writes import mark_columns, update_columns

__all__ = [
    "cast_master_weights_to_fp8",
    "clear_columnwise_cache",
    "is_custom",
    "post_all_gather_processing",
    "quantize_master_weights",
    "replace_raw_data",
]


def is_custom(value: Any = None) -> bool:
    """Return whether a tensor or quantizer belongs to a custom format, which only its quantizer can multiply."""
    return bool(getattr(value, "custom", False))


def replace_raw_data(tensor: QuantizedTensor, new_raw_data: Tensor) -> None:
    """Move the row-wise codes into another buffer with the same shape, which tensor uses from then on."""
    name = "_data" if isinstance(tensor, Float8Tensor) else "_rowwise_data"
    old = getattr(tensor, name, None)
    if old is None:
        raise ValueError(
            f"{type(tensor).__name__} has no row-wise codes to move; quantize with rowwise=True"
        )
    if old.dtype != new_raw_data.dtype or old.shape != new_raw_data.shape:
        raise ValueError(
            f"the buffer is {new_raw_data.dtype} {tuple(new_raw_data.shape)}, the codes are {old.dtype} "
            f"{tuple(old.shape)}; give a buffer of the codes' dtype and shape"
        )
    with torch.no_grad():
        new_raw_data.detach().copy_(old)
    setattr(tensor, name, new_raw_data)


def quantize_master_weights(
    model_weights: Sequence[QuantizedTensor],
    master_weights: Sequence[Tensor | None],
    start_offsets: Sequence[int | None],
    group: Any,
    fsdp_shard_model_weights: Sequence[Any] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Write codes of master_weights[i], a flat run of model_weights[i] from start_offsets[i], or None when not owned.

    Values are rounded to the weight's nominal dtype first, as unquantized training would do. Scales come from maxima
    over the group; None: over all ranks, where torch.distributed is initialised. fsdp_shard_model_weights[i], the run's
    flat uint8 codes (MXFP8: row-wise and column-wise in a tuple or list), is written instead of its own codes. The
    weights' high-precision initial values, if they were preserved, are dropped.

    Column-wise codes that follow from the row-wise ones are dropped, and made again by the next forward. With
    manual_post_all_gather_processing they stay, out of date, until the caller calls `post_all_gather_processing`, or
    until a forward that is neither compiled nor captured reads them, which makes them in place as that does.
    """
    if not len(model_weights) == len(master_weights) == len(start_offsets):
        raise ValueError(
            f"{len(model_weights)} weights, {len(master_weights)} masters and {len(start_offsets)} offsets; "
            "give one of each for every weight"
        )
    targets = (
        [None] * len(model_weights)
        if fsdp_shard_model_weights is None
        else fsdp_shard_model_weights
    )
    shards = []
    for weight, master, start, target in zip(
        model_weights, master_weights, start_offsets, targets, strict=True
    ):
        values = (
            torch.empty(0, device=weight.device) if master is None else master.detach().reshape(-1)
        )
        start = 0 if start is None or master is None else start
        if start + values.numel() > weight.numel():
            raise ValueError(
                f"elements {start}:{start + values.numel()} are outside of a weight of {weight.numel()} elements; "
                "check start_offsets"
            )
        rowwise, columnwise = target if isinstance(target, (tuple, list)) else (target, None)
        shards.append(Shard(weight, values.to(weight.dtype), start, (rowwise, columnwise)))
    with torch.no_grad():
        if (
            group is None
            and torch.distributed.is_available()
            and torch.distributed.is_initialized()
        ):
            group = torch.distributed.group.WORLD
        write_shards(shards, group)
        for weight in model_weights:
            forget_initial_values(weight)
            if not manual_post_all_gather_processing:
                clear_columnwise_cache(weight)
            else:
                mark_columns(weight)


cast_master_weights_to_fp8 = quantize_master_weights


def clear_columnwise_cache(tensor: QuantizedTensor | Sequence[QuantizedTensor]) -> None:
    """Drop column-wise codes that can be made again from row-wise ones, for one weight or several."""
    for weight in _weights(tensor):
        usages = weight.get_usages()
        if weight.transposable and usages["rowwise"] and usages["columnwise"]:
            weight.update_usage(columnwise_usage=False)


def post_all_gather_processing(model_weights: Tensor | Sequence[Tensor]) -> None:
    """Make column-wise codes from row-wise ones that were gathered, for one weight or several; plain ones have none.

    Codes that are there are overwritten in place: a forward that has run since the weights were written, and a graph
    that was captured, hold these very tensors for their backward.
    """
    with torch.no_grad():
        for weight in _weights(model_weights):
            if weight.transposable:
                update_columns(weight)


def _weights(weights: Tensor | Sequence[Tensor]) -> list[QuantizedTensor]:
    """Return the quantized weights among one weight or several."""
    several = [weights] if isinstance(weights, Tensor) else weights
    return [weight for weight in several if isinstance(weight, QuantizedTensor)]
