"""FP8 with one scale a tensor on a GPU, planned once a shape: a warm call allocates and launches, nothing else."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ....common.kernels import launch
from ....common.kernels.launch import Launch
from ...device import is_current_device
from ..launching import makers_of
from ..zeros import scalar, zero_and_scalar
from .spec import Quantized, QuantizeSpec


class Float8Call:
    """codes and scales of matrices of one shape on one device, as one spec asks for them.

    A given scale makes one launch, which also finds or raises the maximum; current scaling takes a launch that finds
    the maximum, unless it is given, and one that casts.
    """

    def __init__(
        self,
        spec: QuantizeSpec,
        shape: tuple[int, int],
        device: torch.device,
        scale_given: bool,
        amax_given: bool,
    ):
        self.device = device
        self.measure, self.cast = launches(spec, *shape, scale_given, amax_given, device.type == "cuda")
        self.make_codes, self.make_codes_t, _ = makers_of(self.cast, device)

    def __call__(
        self,
        x: Tensor,
        scale: Tensor | None,
        amax: Tensor | None,
        record: Tensor | None,
    ) -> Quantized:
        if self.device.type == "cuda" and not is_current_device(self.device.index):
            with torch.cuda.device(self.device):
                return self._quantize(x, scale, amax, record)
        return self._quantize(x, scale, amax, record)

    def _quantize(
        self, x: Tensor, scale: Tensor | None, amax: Tensor | None, record: Tensor | None
    ) -> Quantized:
        device, index = self.device, self.device.index
        if not x.is_contiguous():
            x = x.contiguous()
        if record is not None:
            amax, inverse = record, scalar(device)
        elif amax is None:
            amax, inverse = zero_and_scalar(device)
            if self.measure is not None:
                launch.start(self.measure, (x,), index, (amax,))
        else:
            inverse = scalar(device)
        codes = None if self.make_codes is None else self.make_codes()
        codes_t = None if self.make_codes_t is None else self.make_codes_t()
        inputs = (x, as_float32(scale), as_float32(amax))
        launch.start(self.cast, inputs, index, (codes, codes_t, inverse))
        return Quantized(
            codes,
            inverse if codes is not None else None,
            codes_t,
            inverse if codes_t is not None else None,
            amax,
        )


def as_float32(value: Tensor | None) -> Tensor | None:
    """A scale or maximum as kernels read it; `to` alone costs the host more than the comparison."""
    return value if value is None or value.dtype is torch.float32 else value.to(torch.float32)


@functools.lru_cache(maxsize=4096)
def call_of(
    spec: QuantizeSpec, shape: tuple[int, int], device: torch.device, scale_given: bool, amax_given: bool
) -> Float8Call:
    """The plan of such calls."""
    return Float8Call(spec, shape, device, scale_given, amax_given)


@functools.lru_cache(maxsize=4096)
def launches(
    spec: QuantizeSpec, rows: int, depth: int, scale_given: bool, amax_given: bool, overlaps: bool
) -> tuple[Launch | None, Launch]:
    """The pass that finds amax, where one is needed, and the cast."""
    from ....common.kernels import cast as kernels  # it imports triton

    follows = not scale_given and not amax_given
    cast = kernels.cast(
        (rows, depth),
        spec.element,
        spec.rowwise,
        spec.columnwise,
        records=scale_given and not amax_given,
        follows=follows and overlaps,
        power_of_two=spec.power_of_two,
        epsilon=spec.epsilon,
    )
    return kernels.absolute_maximum(rows * depth, overlaps=overlaps) if follows else None, cast
