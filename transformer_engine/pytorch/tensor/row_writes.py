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

OUT_OF_DATE = "_columns_out_of_date"  # attribute on a marked weight; others lack it
ROWS_OF = "_rows_of"  # attribute on a row slice; None on a tensor whose slices are to be independent


class _Place(NamedTuple):
    whole: Any
    start: int
    stop: int


def remember_place(part: Any, whole: Any, start: int) -> Any:
    """Return part, the rows of whole from start on, with a record of its base tensor."""
    if ROWS_OF in vars(whole):
        outer = getattr(whole, ROWS_OF)
        if outer is None:
            return same_place(whole, part)
        if outer.whole.shape[1:] == whole.shape[1:]:
            whole, start = outer.whole, outer.start + start
    setattr(part, ROWS_OF, _Place(whole, start, start + part.shape[0]))
    return part


def same_place(tensor: Any, view: Any) -> Any:
    """Return a view of all tensor elements, with tensor's record of its base tensor."""
    if ROWS_OF in vars(tensor):
        setattr(view, ROWS_OF, getattr(tensor, ROWS_OF))
    return view


def write(values: Tensor, target: Any) -> None:
    """Quantize values, shaped like target, into target and, if target is a row slice, into its base tensor."""
    place: _Place | None = vars(target).get(ROWS_OF)
    if place is None:
        target.writer().update_quantized(values, target)
        return
    rows = values.reshape(place.stop - place.start, *place.whole.shape[1:])
    parts = place.whole.unpack()
    single = (part is not None and part.dim() < 2 for part in (parts.amax, parts.scale, parts.scale_t))
    shares_scale = parts.amax_t is not None or any(single)
    if shares_scale or vars(place.whole).get(ROWS_OF) is not None:
        everything = place.whole.decode(torch.float32)
        everything[place.start : place.stop] = rows
        write(everything, place.whole)
    else:
        usages = place.whole.get_usages()
        fresh = place.whole.writer().encode(rows, usages["rowwise"], usages["columnwise"])
        whole = place.whole
        if isinstance(whole, BlockScaledStorage):
            whole = whole.order_scales(False)
        written = row_views(whole, place.start, place.stop)
        for into, part in zip(written, fresh.unpack(), strict=True):
            if into is not None and part is not None:
                into.copy_(part)
        if whole is not place.whole:
            place.whole.copy_from_storage(whole)
        place.whole.join_claims(fresh)
    # The target may hold padded scale copies: copy them from the whole tensor.
    current = row_slice(place.whole, place.start, place.stop)
    assert current is not None
    shape: Sequence[int] = target.shape
    same = current if tuple(current.shape) == tuple(shape) else current.view_as(tuple(shape))
    assert same is not None
    target.copy_from_storage(same)


def write_quantized(source: QuantizedTensorStorage, target: Any) -> None:
    """Write values whose codes and scales can be copied to target; see `write`."""
    place: _Place | None = vars(target).get(ROWS_OF)
    if place is None:
        target.copy_from_storage(source)
    else:
        write(source.decode(torch.float32), target)


def mark_columns(weight: Any) -> None:
    """Mark the column-wise codes of a weight, if it has any, as out of date."""
    if weight.transposable and weight.get_usages()["columnwise"]:
        setattr(weight, OUT_OF_DATE, True)


def remake_columns(weight: Any) -> None:
    """Compute column-wise codes from the row-wise codes, in place where they exist."""
    vars(weight).pop(OUT_OF_DATE, None)
    usages = weight.get_usages()
    if not (usages["rowwise"] and usages["columnwise"]):
        weight.update_usage(columnwise_usage=True)
        return
    fresh = weight.drop(columnwise=True)
    fresh.update_usage(columnwise_usage=True)
    for name in weight.COLUMNWISE:
        made, old = getattr(fresh, name), getattr(weight, name)
        if old is None or old.shape != made.shape:
            setattr(weight, name, made)
        else:
            # Through `.data`: autograd would reject its saved tensors as modified, but the backward must read them.
            old.data.copy_(made)
