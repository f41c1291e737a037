"""Rows of a quantized tensor [M, ...] cut and joined as bytes: slices for shards, and the gather of a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...primitives.quantize import Quantized
from .quantized_tensor_storage import QuantizedTensorStorage


def row_granularity(storage: QuantizedTensorStorage) -> int:
    """Rows can be cut and joined at multiples of this; 1 where any row will do."""
    return storage.row_granularity()


def row_slice(storage: QuantizedTensorStorage, start: int, stop: int) -> QuantizedTensorStorage | None:
    """storage[start:stop] along dimension 0, codes shared; None where that would cut a block of one scale."""
    shape = storage.shape
    if len(shape) < 2:
        return None
    inner = prod(shape[1:-1])
    rows, first, last = shape[0] * inner, start * inner, stop * inner
    granularity = storage.row_granularity()
    if first % granularity or (last % granularity and last != rows):
        return None
    whole = storage.unpack()
    return storage.storage_class().pack(
        Quantized(
            codes=_rows(whole.codes, rows, first, last),
            scale=_rows(whole.scale, rows, first, last),
            codes_t=_columns(whole.codes_t, rows, first, last),
            scale_t=_columns(whole.scale_t, rows, first, last),
            amax=whole.amax,
            amax_t=whole.amax_t,
        ),
        (stop - start, *shape[1:]),
        **storage.constants(),
    )


def _rows(part: Tensor | None, rows: int, first: int, last: int) -> Tensor | None:
    """Rows first:last of a matrix whose dimension 0 stands for `rows` values; a scale of all rows stays whole."""
    if part is None or part.dim() < 2 or rows == 0:
        return part
    values = -(-rows // part.shape[0])
    return part[first // values : -(-last // values)]


def _columns(part: Tensor | None, rows: int, first: int, last: int) -> Tensor | None:
    if part is None or part.dim() < 2 or rows == 0:
        return part
    values = -(-rows // part.shape[1])
    return part[:, first // values : -(-last // values)]


@dataclass(frozen=True)
class GatheredPayload:
    """How to read gathered bytes: the fields of `Quantized` they are, in order, and what was not gathered."""

    storage_class: type[QuantizedTensorStorage]
    constants: dict[str, Any]
    inner_shape: tuple[int, ...]
    fields: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    whole: dict[str, Tensor]
    packing: int
    columnwise: bool


def gather_payload(storage: QuantizedTensorStorage) -> tuple[tuple[Tensor, ...], GatheredPayload]:
    """uint8 and float32 matrices whose dimension 0 runs over rows; scales of the whole tensor go beside them."""
    usages = storage.get_usages()
    if storage.transposable and usages["rowwise"]:
        storage = storage.drop(columnwise=True)  # made again after the gather, instead of sent
    parts = storage.unpack()._asdict()
    fields, tensors, dtypes, whole = [], [], [], {}
    for name, part in parts.items():
        if part is None:
            continue
        if part.dim() < 2:
            whole[name] = part
            continue
        part = part.t() if name.endswith("_t") else part
        fields.append(name)
        dtypes.append(part.dtype)
        part = part.contiguous()
        tensors.append(part.view(torch.uint8) if part.element_size() == 1 else part)
    payload = GatheredPayload(
        storage.storage_class(),
        storage.constants(),
        tuple(storage.shape[1:]),
        tuple(fields),
        tuple(dtypes),
        whole,
        storage.format.packing,
        usages["columnwise"],
    )
    return tuple(tensors), payload


def join_payload(
    tensors: Sequence[Tensor], payload: GatheredPayload, dtype: torch.dtype
) -> QuantizedTensorStorage:
    """The storage whose rows are the gathered ones."""
    parts: dict[str, Tensor] = {name: part.clone() for name, part in payload.whole.items()}
    for name, kind, tensor in zip(payload.fields, payload.dtypes, tensors, strict=True):
        tensor = tensor.view(kind)
        parts[name] = tensor.t().contiguous() if name.endswith("_t") else tensor
    codes = parts["codes"] if "codes" in parts else parts["codes_t"].t()
    inner = prod(payload.inner_shape[:-1])
    rows = codes.shape[0] if "codes" in parts else codes.shape[0] * payload.packing
    shape = (rows // max(inner, 1), *payload.inner_shape)
    constants = payload.constants | {"dtype": dtype}
    storage = payload.storage_class.pack(Quantized(**parts), shape, **constants)
    if payload.columnwise:
        storage.update_usage(columnwise_usage=True)
    return storage
