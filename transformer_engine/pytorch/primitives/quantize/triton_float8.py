"""FP8 with one scale a tensor on a GPU: one launch for a given scale, two where it is made of the maximum."""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime.launching import Performed
from .format_row import PlannedCall
from .spec import Quantized, Request


def plan(request: Request) -> PlannedCall:
    """The codes and the scale of matrices of one shape on one device, as one spec asks for them."""
    from ....common.kernels import cast as kernels  # it imports triton

    def performed(amax: str) -> Performed:
        spec, overlaps = request.spec, request.device.type == "cuda"
        scaling = {"power_of_two": spec.power_of_two, "epsilon": spec.epsilon}
        directions = (spec.element, spec.rowwise, spec.columnwise)
        program = kernels.one_scale(request.shape, *directions, amax, overlaps=overlaps, **scaling)
        return Performed(program, request.device)

    if request.amax_given:
        return _by_amax(performed(kernels.GIVEN))
    if request.multiplier_given:
        return _by_multiplier(performed(kernels.RECORDED), performed(kernels.MEASURED))
    measured = performed(kernels.SCALES)
    return lambda x, multiplier, amax, amax_t, record, random=None: Quantized(*measured(_contiguous(x)))


def _by_amax(given: Performed) -> PlannedCall:
    def call(
        x: Tensor, multiplier: Tensor | None, amax: Tensor | None, amax_t: Tensor | None,
        record: Tensor | None, random: tuple[Tensor, Tensor] | None = None,
    ) -> Quantized:  # fmt: skip
        return Quantized(*given(_contiguous(x), as_float32(multiplier), as_float32(amax)))._replace(amax=amax)

    return call


def _by_multiplier(recorded: Performed, measured: Performed) -> PlannedCall:
    def call(
        x: Tensor, multiplier: Tensor | None, amax: Tensor | None, amax_t: Tensor | None,
        record: Tensor | None, random: tuple[Tensor, Tensor] | None = None,
    ) -> Quantized:  # fmt: skip
        x, multiplier = _contiguous(x), as_float32(multiplier)
        return Quantized(*(measured(x, multiplier) if record is None else recorded(x, multiplier, record)))

    return call


def _contiguous(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous()


def as_float32(value: Tensor | None) -> Tensor | None:
    """A scale or maximum as kernels read it; `to` alone costs the host more than the comparison."""
    return value if value is None or value.dtype is torch.float32 else value.to(torch.float32)
