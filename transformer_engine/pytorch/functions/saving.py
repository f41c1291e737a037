"""Storages through save_for_backward: tensors in one flat tuple, recipes for putting them together beside it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..tensor.quantized_tensor import QuantizedTensorStorage


def pack(*storages: QuantizedTensorStorage | None) -> tuple[list[Tensor | None], list]:
    """All tensors of the storages in order, and for each storage (its rebuild, how many tensors are its)."""
    tensors: list[Tensor | None] = []
    rebuilds: list = []
    for storage in storages:
        if storage is None:
            rebuilds.append(None)
            continue
        parts, rebuild = storage.flatten()
        tensors.extend(parts)
        rebuilds.append((rebuild, len(parts)))
    return tensors, rebuilds


def unpack(tensors: Sequence[Tensor | None], rebuilds: list) -> list[QuantizedTensorStorage | None]:
    """The storages that `pack` took apart, made anew."""
    storages: list[QuantizedTensorStorage | None] = []
    start = 0
    for entry in rebuilds:
        if entry is None:
            storages.append(None)
            continue
        rebuild, count = entry
        storages.append(rebuild(tuple(tensors[start : start + count])))
        start += count
    return storages
