"""Formats with a scale a tile on a GPU, planned once a shape: a warm call allocates and launches, nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ....common.kernels import launch
from ....common.kernels.launch import Launch
from ...device import is_current_device
from .. import launching
from .spec import Quantized, QuantizeSpec

# (spec, shape, dtype, device) -> the launch
LaunchOf = Callable[[QuantizeSpec, "tuple[int, int]", torch.dtype, torch.device], Launch]


class TiledCall:
    """codes and scales of matrices of one shape and dtype on one device, as one spec asks for them, in one launch."""

    def __init__(self, of: Launch, device: torch.device):
        self.device = device
        self.launch = of
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
    launch_of: LaunchOf,
    spec: QuantizeSpec,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> TiledCall:
    """The plan of such calls."""
    return TiledCall(launch_of(spec, shape, dtype, device), device)
