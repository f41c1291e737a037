"""FP8 with one float32 scale for the whole matrix: given, or made from its absolute maximum."""

from __future__ import annotations

import torch
from torch import Tensor

from .....common.formats import FLOAT8
from ....runtime.device import current_hardware
from ....runtime.launching import Performed
from ...operand import Operand
from ..encodings import absolute_maximum, cast, scale_from_amax, transposed, widen
from ..format_row import FormatRow, PlannedCall, QuantizeInputs, as_float32
from ..spec import CODE_DTYPES, Quantized, QuantizeRequest, QuantizeSpec


def quantize(x: Tensor, spec: QuantizeSpec, inputs: QuantizeInputs) -> Quantized:
    """Quantize x [M, K] in the directions of spec, with one scale [1] for both, and return the maximum too."""
    multiplier, amax, record = inputs.multiplier, inputs.amax, inputs.record
    if x.device.type == "meta":
        # Delayed-scaling states have values, which a matrix without values does not change.
        multiplier, record = [None if t is None else t.to("meta") for t in (multiplier, record)]
    if amax is None:
        amax = absolute_maximum(x)
    if multiplier is None:
        largest = torch.finfo(CODE_DTYPES[spec.element.name]).max
        multiplier = scale_from_amax(
            amax, largest, power_of_two=spec.power_of_two, epsilon=spec.epsilon
        )
    codes = cast(x.to(torch.float32) * multiplier, spec.element).contiguous()
    codes_t = transposed(codes) if spec.columnwise else None
    inverse = multiplier.to(torch.float32).reciprocal()
    if record is not None:
        record.copy_(torch.maximum(record, amax.reshape(record.shape)))
        amax = record
    return Quantized(
        codes=codes if spec.rowwise else None,
        scale=inverse if spec.rowwise else None,
        codes_t=codes_t,
        scale_t=inverse if spec.columnwise else None,
        amax=amax,
    )


def dequantize(operand: Operand, scale: Tensor) -> Tensor:
    """Return codes * scale."""
    return (widen(operand.codes) * scale).to(operand.dtype)


def _plan(request: QuantizeRequest) -> PlannedCall:
    """Bind the kernels of one request: one launch for a given scale, two where the maximum determines it."""
    from .....common.kernels import cast as kernels

    def performed(amax: str) -> Performed:
        spec = request.spec
        overlaps = request.device.type == "cuda" and current_hardware().has("dependent launch")
        scaling = {"power_of_two": spec.power_of_two, "epsilon": spec.epsilon}
        directions = (spec.element, spec.rowwise, spec.columnwise)
        program = kernels.one_scale(request.shape, *directions, amax, overlaps=overlaps, **scaling)
        return Performed(program, request.device)

    if request.amax_given:
        launch = performed(kernels.GIVEN)

        def cast_by_amax(x: Tensor, inputs: QuantizeInputs) -> Quantized:
            x = x if x.is_contiguous() else x.contiguous()
            amax = inputs.amax
            return Quantized(*launch(x, as_float32(inputs.multiplier), as_float32(amax)))._replace(
                amax=amax
            )

        return cast_by_amax
    if request.multiplier_given:
        recorded, measured = performed(kernels.RECORDED), performed(kernels.MEASURED)

        def cast_by_multiplier(x: Tensor, inputs: QuantizeInputs) -> Quantized:
            x = x if x.is_contiguous() else x.contiguous()
            multiplier, record = as_float32(inputs.multiplier), inputs.record
            return Quantized(
                *(measured(x, multiplier) if record is None else recorded(x, multiplier, record))
            )

        return cast_by_multiplier
    scales = performed(kernels.SCALES)
    return lambda x, inputs: Quantized(*scales(x if x.is_contiguous() else x.contiguous()))


FORMAT_ROWS = (FormatRow(FLOAT8, quantize, dequantize, plan=_plan),)
