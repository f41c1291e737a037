"""Formats with a scale a tile on a GPU, planned once a shape: a warm call allocates and launches, nothing else."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ....common.formats import BLOCK_2D, FLOAT32_MAX, MXFP8
from ....common.kernels import launch
from ....common.kernels.launch import Launch
from ...device import is_current_device
from .. import launching
from .spec import Quantized, QuantizeSpec


class TiledCall:
    """codes and scales of matrices of one shape and dtype on one device, as one spec asks for them, in one launch."""

    def __init__(self, spec: QuantizeSpec, shape: tuple[int, int], dtype: torch.dtype, device: torch.device):
        self.device = device
        self.launch = _launch(spec, shape, dtype, device)
        self.makers = launching.makers_of(self.launch, device)

    def __call__(self, x: Tensor) -> Quantized:
        if self.device.type == "cuda" and not is_current_device(self.device.index):
            with torch.cuda.device(self.device):
                return self._quantize(x)
        return self._quantize(x)

    def _quantize(self, x: Tensor) -> Quantized:
        if not x.is_contiguous():
            x = x.contiguous()
        outputs = [None if make is None else make() for make in self.makers]
        launch.start(self.launch, (x,), self.device.index, outputs)
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
