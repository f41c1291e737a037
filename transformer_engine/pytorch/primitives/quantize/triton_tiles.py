"""Formats with a scale a tile on a GPU, planned once a shape: a warm call allocates and launches, nothing else."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ....common.formats import BLOCK_2D, FLOAT32_MAX, MXFP8
from ....common.kernels import launch
from ....common.kernels.launch import Launch, Output
from ...device import is_current_device
from .. import launching
from .spec import Quantized, QuantizeSpec


class _Allocation(NamedTuple):
    """An output as callers see it; its memory is what the kernel writes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, output: Output | None) -> _Allocation | None:
        if output is None:
            return None
        dtype = getattr(torch, output.dtype)
        rows, columns = output.shape
        if output.transposed:
            return cls((columns, rows), (1, columns), dtype)
        return cls((rows, columns), (columns, 1), dtype)


class TiledCall:
    """codes and scales of matrices of one shape and dtype on one device, as one spec asks for them, in one launch."""

    def __init__(self, spec: QuantizeSpec, shape: tuple[int, int], dtype: torch.dtype, device: torch.device):
        self.device = device
        self.launch = _launch(spec, shape, dtype, device)
        self.allocations = tuple(_Allocation.of(output) for output in self.launch.outputs)

    def __call__(self, x: Tensor) -> Quantized:
        if self.device.type == "cuda" and not is_current_device(self.device.index):
            with torch.cuda.device(self.device):
                return self._quantize(x)
        return self._quantize(x)

    def _quantize(self, x: Tensor) -> Quantized:
        device = self.device
        if not x.is_contiguous():
            x = x.contiguous()
        outputs = [
            None if a is None else torch.empty_strided(a[0], a[1], dtype=a[2], device=device)
            for a in self.allocations
        ]
        launch.start(self.launch, (x, *outputs), device.index)
        return Quantized(*outputs)


@functools.lru_cache(maxsize=4096)
def tiled_call(
    spec: QuantizeSpec, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> TiledCall:
    """The plan of such calls."""
    return TiledCall(spec, shape, dtype, device)


def _launch(spec: QuantizeSpec, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Launch:
    from ....common.kernels import block_cast, mxfp8  # they import triton

    if spec.format.name == MXFP8.name:
        return mxfp8.blocks(shape, spec.element, spec.rowwise, spec.columnwise, square=spec.two_dimensional)
    scales = {
        "power_of_two": spec.power_of_two,
        "epsilon": spec.epsilon,
        "value_for_inf": min(torch.finfo(dtype).max, FLOAT32_MAX),
    }
    if spec.format.name == BLOCK_2D.name:
        return block_cast.square_blocks(shape, spec.element, spec.rowwise, spec.columnwise, **scales)
    return block_cast.row_blocks(
        shape,
        spec.element,
        spec.rowwise,
        spec.columnwise,
        processors=launching.processors(device.index).count,
        **scales,
    )
