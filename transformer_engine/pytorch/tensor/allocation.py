"""Uninitialised codes and scales of a matrix [M, K], shaped as `quantize` would return them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...common.formats import ceil_div
from ..primitives.quantize import Quantized, QuantizeSpec, torch_dtype

_SCALE_DTYPES = {"float32": torch.float32, "e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn}


def empty_quantized(
    spec: QuantizeSpec, rows: int, depth: int, device: torch.device | str | None
) -> Quantized:
    """Buffers for the directions that spec asks for."""
    two_levels = spec.format.levels is not None
    maxima = rows if spec.format.row_scaled else 1
    scale = _empty_scale(spec, rows, depth, device)
    return Quantized(
        codes=_empty_codes(spec, rows, depth, device) if spec.rowwise else None,
        scale=scale if spec.rowwise else None,
        codes_t=_empty_codes(spec, depth, rows, device) if spec.columnwise else None,
        scale_t=_empty_scale(spec, depth, rows, device) if spec.columnwise else None,
        amax=torch.empty(maxima, dtype=torch.float32, device=device) if two_levels and spec.rowwise else None,
        amax_t=torch.empty(1, dtype=torch.float32, device=device) if two_levels and spec.columnwise else None,
    )


def _empty_codes(spec: QuantizeSpec, rows: int, depth: int, device: torch.device | str | None) -> Tensor:
    return torch.empty((rows, depth // spec.format.packing), dtype=torch_dtype(spec.element), device=device)


def _empty_scale(spec: QuantizeSpec, rows: int, depth: int, device: torch.device | str | None) -> Tensor:
    block = spec.format.block
    shape = (1,) if block is None else (ceil_div(rows, block[0]), ceil_div(depth, block[1]))
    return torch.empty(shape, dtype=_SCALE_DTYPES[spec.format.scale], device=device)
