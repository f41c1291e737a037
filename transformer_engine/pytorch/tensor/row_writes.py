"""Writes to parts of a quantized tensor that keep its other parts correct: rows, and column-wise codes.

A row slice shares its codes with the whole tensor. Where the format has one scale (or maximum) for the whole tensor, a
new scale for the rows would change every other row, so that the whole tensor is quantized again. Where blocks have
their own scales, the rows' codes and scales are written into the whole tensor, as a slice may hold a padded copy of its
scales. A weight's column-wise codes are marked by an attribute if its row-wise codes were written alone; the tensor's
aliases and copies have the attribute too; `update_usage` computes them before they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .storage.block_scaled import BlockScaledStorage
from .storage.fsdp import row_slice, row_views
from .storage.quantized_tensor_storage import QuantizedTensorStorage

# Name of the attribute on weights whose column-wise codes are older than their row-wise codes.
STALE_COLUMNS_ATTR = "_columns_out_of_date"
# Name of the attribute on row slices: their `_RowOrigin`. None on a tensor whose slices are independent of it.
ROW_ORIGIN_ATTR = "_rows_of"


class _RowOrigin(NamedTuple):
    """Rows [start:stop] of the base tensor, of which a row slice is a view."""

    base: Any
    start: int
    stop: int


def set_row_origin(part: Any, full: Any, start: int) -> Any:
    """Record on `part` that it is the rows of `full` from `start` on, and return it."""
    if ROW_ORIGIN_ATTR in vars(full):
        outer = getattr(full, ROW_ORIGIN_ATTR)
        if outer is None:
            return copy_row_origin(full, part)
        if outer.base.shape[1:] == full.shape[1:]:
            full, start = outer.base, outer.start + start
    setattr(part, ROW_ORIGIN_ATTR, _RowOrigin(full, start, start + part.shape[0]))
    return part


def copy_row_origin(tensor: Any, view: Any) -> Any:
    """Copy the row origin of `tensor`, if it is a row slice, to a view of all its elements, and return the view."""
    if ROW_ORIGIN_ATTR in vars(tensor):
        setattr(view, ROW_ORIGIN_ATTR, getattr(tensor, ROW_ORIGIN_ATTR))
    return view


def write(values: Tensor, target: Any) -> None:
    """Quantize values, shaped like target, into target and, if target is a row slice, into its base tensor."""
    origin: _RowOrigin | None = vars(target).get(ROW_ORIGIN_ATTR)
    if origin is None:
        target.writer().update_quantized(values, target)
        return
    rows = values.reshape(origin.stop - origin.start, *origin.base.shape[1:])
    parts = origin.base.unpack()
    single = (
        part is not None and part.dim() < 2 for part in (parts.amax, parts.scale, parts.scale_t)
    )
    shares_scale = parts.amax_t is not None or any(single)
    if shares_scale or vars(origin.base).get(ROW_ORIGIN_ATTR) is not None:
        everything = origin.base.decode(torch.float32)
        everything[origin.start : origin.stop] = rows
        write(everything, origin.base)
    else:
        usages = origin.base.get_usages()
        encoded = origin.base.writer().encode(rows, usages["rowwise"], usages["columnwise"])
        full = origin.base
        if isinstance(full, BlockScaledStorage):
            full = full.order_scales(False)
        written = row_views(full, origin.start, origin.stop)
        for into, part in zip(written, encoded.unpack(), strict=True):
            if into is not None and part is not None:
                into.copy_(part)
        if full is not origin.base:
            origin.base.copy_from_storage(full)
        origin.base.join_claims(encoded)
    # The target may hold padded scale copies: copy them from the whole tensor.
    current = row_slice(origin.base, origin.start, origin.stop)
    assert current is not None
    shape: Sequence[int] = target.shape
    shaped = current if tuple(current.shape) == tuple(shape) else current.with_shape(tuple(shape))
    assert shaped is not None
    target.copy_from_storage(shaped)


def write_quantized(source: QuantizedTensorStorage, target: Any) -> None:
    """Copy codes and scales of source into target and, if target is a row slice, into its base tensor."""
    origin: _RowOrigin | None = vars(target).get(ROW_ORIGIN_ATTR)
    if origin is None:
        target.copy_from_storage(source)
    else:
        write(source.decode(torch.float32), target)


def mark_columns(weight: Any) -> None:
    """Mark the column-wise codes of a weight, if it has any, as out of date."""
    if weight.transposable and weight.get_usages()["columnwise"]:
        setattr(weight, STALE_COLUMNS_ATTR, True)


def update_columns(weight: Any) -> None:
    """Compute column-wise codes from the row-wise codes, in place where they exist."""
    vars(weight).pop(STALE_COLUMNS_ATTR, None)
    usages = weight.get_usages()
    if not (usages["rowwise"] and usages["columnwise"]):
        weight.update_usage(columnwise_usage=True)
        return
    transposed = weight.drop(columnwise=True)
    transposed.update_usage(columnwise_usage=True)
    for name in weight.COLUMNWISE:
        buffer, old = getattr(transposed, name), getattr(weight, name)
        if old is None or old.shape != buffer.shape:
            setattr(weight, name, buffer)
        else:
            # Through `.data`: autograd would reject its saved tensors as modified, but the backward must read them.
            old.data.copy_(buffer)
