"""Writes into rows of a quantized tensor: what the rows share with the others must go on being right for those.

A row slice shares its codes with the whole. Where the format has one scale (or maximum) for the whole tensor, a new
scale of the rows would give every other row new values, so the whole is quantized again. Where blocks have scales of
their own, the rows' codes and scales are written into the whole's, as a slice may hold a padded copy of its scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .storage.fsdp import row_slice, row_views
from .storage.quantized_tensor_storage import QuantizedTensorStorage

ROWS_OF = "_rows_of"  # the attribute of a row slice; None on a tensor whose slices are to be independent


class _Place(NamedTuple):
    whole: Any
    start: int
    stop: int


def remember_place(part: Any, whole: Any, start: int) -> Any:
    """part, rows of whole from start on, with the tensor that it is a part of."""
    if ROWS_OF in vars(whole):
        outer = getattr(whole, ROWS_OF)
        if outer is None:
            return same_place(whole, part)
        if outer.whole.shape[1:] == whole.shape[1:]:
            whole, start = outer.whole, outer.start + start
    setattr(part, ROWS_OF, _Place(whole, start, start + part.shape[0]))
    return part


def same_place(tensor: Any, view: Any) -> Any:
    """view, of all of tensor's elements, lies where tensor lies."""
    if ROWS_OF in vars(tensor):
        setattr(view, ROWS_OF, getattr(tensor, ROWS_OF))
    return view


def write(values: Tensor, target: Any) -> None:
    """Quantize values, of target's shape, into target and, if it is rows of another tensor, into that one."""
    place: _Place | None = vars(target).get(ROWS_OF)
    if place is None:
        target.writer().update_quantized(values, target)
        return
    rows = values.reshape(place.stop - place.start, *place.whole.shape[1:])
    if _shares_scale(place.whole) or vars(place.whole).get(ROWS_OF) is not None:
        everything = place.whole.decode(torch.float32)
        everything[place.start : place.stop] = rows
        write(everything, place.whole)
    else:
        usages = place.whole.get_usages()
        _put(place.whole.writer().encode(rows, usages["rowwise"], usages["columnwise"]), place)
    _reread(target, place)


def write_quantized(source: QuantizedTensorStorage, target: Any) -> None:
    """`write` of values whose codes and scales target can take as they are."""
    place: _Place | None = vars(target).get(ROWS_OF)
    if place is None:
        target.copy_from_storage(source)
    else:
        write(source.decode(torch.float32), target)


def _shares_scale(whole: QuantizedTensorStorage) -> bool:
    parts = whole.unpack()
    return parts.amax_t is not None or any(
        _is_single(part) for part in (parts.amax, parts.scale, parts.scale_t)
    )


def _is_single(scale: Tensor | None) -> bool:
    return scale is not None and scale.dim() < 2


def _put(fresh: QuantizedTensorStorage, place: _Place) -> None:
    written = row_views(place.whole, place.start, place.stop)
    for into, part in zip(written, fresh.unpack(), strict=True):
        if into is not None and part is not None:
            into.copy_(part)


def _reread(target: Any, place: _Place) -> None:
    """Let target's own copies, of padded scales, follow the whole."""
    rows = row_slice(place.whole, place.start, place.stop)
    assert rows is not None
    shape: Sequence[int] = target.shape
    same = rows if tuple(rows.shape) == tuple(shape) else rows.viewed(tuple(shape))
    assert same is not None
    target.copy_from_storage(same)
