"""Grouped quantization as one `quantize` call per group, with results where the kernels put theirs.

It needs every group's row count on the host, and waits for the device if it must read them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ....common.formats import round_up
from ..grouped_gemm import Groups, Matrices
from ..quantize import Quantized, QuantizeSpec, quantize
from .spec import GroupedQuantized, GroupedQuantizeRequest, ScaleSlots


def _run(
    request: GroupedQuantizeRequest,
    values: Tensor | Matrices,
    groups: Groups | None,
    slots: ScaleSlots | None,
) -> GroupedQuantized:
    spec = request.spec
    if isinstance(values, Matrices):
        parts = _each(values.tensors, spec, slots)
        stacks = [_stack_tensors([part[i] for part in parts]) for i in range(4)]
        codes, scale, codes_t, scale_t = stacks
        if spec.tile is None:
            scale, scale_t = (
                None if s is None else s.reshape(-1, 1).repeat(1, 4) for s in (scale, scale_t)
            )
        return GroupedQuantized(codes, scale, codes_t, scale_t)
    assert groups is not None
    parts = _each(groups.split(values), spec, slots)
    scale, scale_t = _flat([part.scale for part in parts]), _flat([part.scale_t for part in parts])
    if spec.tile is None:
        scale, scale_t = (
            None if s is None else s.reshape(-1, 1).repeat(1, 4) for s in (scale, scale_t)
        )
    return GroupedQuantized(
        _join_tensors([part.codes for part in parts]),
        scale,
        _tiles([part.codes_t for part in parts])
        if request.tiled
        else _flat([_padded(part.codes_t) for part in parts]),
        scale_t,
    )


def _each(parts: Sequence[Tensor], spec: QuantizeSpec, slots: ScaleSlots | None) -> list[Quantized]:
    if slots is None:
        return [quantize(part, spec) for part in parts]
    results = []
    for group, part in enumerate(parts):
        scale, amax = slots.of_group(group)
        results.append(quantize(part, spec, multiplier=scale, record=amax))
    return results


def _stack_tensors(tensors: list[Tensor | None]) -> Tensor | None:
    found = [tensor for tensor in tensors if tensor is not None]
    return _bytewise(torch.stack, found) if found else None


def _join_tensors(tensors: list[Tensor | None]) -> Tensor | None:
    found = [tensor for tensor in tensors if tensor is not None]
    return _bytewise(torch.cat, found) if found else None


def _flat(tensors: list[Tensor | None]) -> Tensor | None:
    """Concatenate scales in memory order: 1x128-block scales have contiguous rows, hence the transpose."""
    found = [tensor for tensor in tensors if tensor is not None]
    if not found:
        return None
    return _bytewise(
        torch.cat,
        [(t.t() if t.dtype == torch.float32 and t.dim() == 2 else t).reshape(-1) for t in found],
    )


def _padded(codes_t: Tensor | None) -> Tensor | None:
    """Pad [K, rows] with zero codes to a multiple of 128 rows."""
    if codes_t is None:
        return None
    more = round_up(codes_t.shape[1], 128) - codes_t.shape[1]
    return torch.nn.functional.pad(codes_t.view(torch.uint8), (0, more)).view(codes_t.dtype)


def _tiles(codes_t: list[Tensor | None]) -> Tensor | None:
    """Split codes [K, rows] into tiles [K, 128] of 128 rows, with zeros behind a group's last row."""
    padded = [_padded(codes) for codes in codes_t]
    return _join_tensors(
        [
            None
            if codes is None
            else codes.view(len(codes), codes.shape[1] // 128, 128).transpose(0, 1)
            for codes in padded
        ]
    )


def _bytewise(function: Callable[[list[Tensor]], Tensor], tensors: list[Tensor]) -> Tensor:
    """Apply a function to FP8 tensors viewed as bytes, because torch cannot join them on every device."""
    if tensors[0].element_size() != 1:
        return function(tensors)
    return function([tensor.view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)


BACKEND: Backend[GroupedQuantizeRequest] = Backend(
    "reference", bind=lambda request: functools.partial(_run, request)
)
