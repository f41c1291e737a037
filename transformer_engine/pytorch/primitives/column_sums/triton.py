"""Column sums on a GPU: over row strips, then over strips, fused with a cast of the same matrix if requested."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from typing import Any

from torch import Tensor

from ....common.dispatch import Backend, interventions
from ....common.kernels.launch import LARGEST_EXTENT, Machine
from ...runtime import launching
from ...runtime.device import current_hardware
from ...runtime.launching import DTYPE_NAMES, Performed, rows_dense, unsupported_elementwise
from ..quantize import CastRequest, Quantized, fused_codes
from ..quantize.format_row import as_float32
from .reference import ColumnSumsRequest, with_cast

_NO_CONSTANTS = (0.0, 0.0, 0.0)


def unsupported_reason(request: ColumnSumsRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    if (
        reason := unsupported_elementwise(request.device, request.dtype, request.result)
    ) is not None:
        return reason
    if 0 in request.shape:
        return f"{list(request.shape)} has no elements"
    if max(request.shape) >= LARGEST_EXTENT:
        return f"an extent of {list(request.shape)} reaches {LARGEST_EXTENT}"
    return None


def bind(request: ColumnSumsRequest) -> Callable[..., Any]:
    """Return x -> sums or, with a cast, (x, multiplier, record) -> (codes, sums)."""
    cast = request.cast
    if cast is not None and cast.inside and request.strides[0] < LARGEST_EXTENT:
        return _with_codes(request, cast)
    from ....common.kernels import column_sums as kernels

    # Row strips, then the partial sums; torch's sum uses 128 MiB scratch memory at 4096 x 4096.
    dense = request.strides[1] == 1 and request.strides[0] < LARGEST_EXTENT
    stride = request.strides[0] if dense else request.shape[1]
    program = kernels.sums(request.shape, stride, DTYPE_NAMES[request.result], _machine(request))
    performed = Performed(program, request.device)

    def sums(x: Tensor) -> Tensor:
        return performed(x if dense else x.contiguous())[0]

    return sums if cast is None else with_cast(request, sums)


def _machine(request: ColumnSumsRequest) -> Machine:
    processors = launching.processors(request.device.index)
    return Machine(*processors, request.dtype.itemsize, current_hardware().threads)


def _with_codes(
    request: ColumnSumsRequest, cast: CastRequest
) -> Callable[[Tensor, Tensor | None, Tensor | None], tuple[Quantized, Tensor]]:
    """Bind the column sums together with a cast of the same matrix."""
    in_blocks = fused_codes.has_block_scales(cast.spec)
    if in_blocks or cast.given:
        # One pass: casting the gradient of the identity also sums the columns of its tiles.
        from ....common.kernels import activation_codes

        stride = request.strides[0] if request.strides[1] == 1 else request.shape[1]
        plain = ("identity", False, request.shape, (stride, 0))
        sums = DTYPE_NAMES[request.result]
        if fused_codes.has_block_scales(cast.spec):
            blocks = fused_codes.blocks(cast.spec, request.dtype)
            program = activation_codes.backward_blocks(
                *plain, _NO_CONSTANTS, blocks, sums, _machine(request)
            )
        else:
            how = fused_codes.one_scale(cast)
            program = activation_codes.backward(
                *plain, DTYPE_NAMES[request.dtype], _NO_CONSTANTS, how, sums
            )
        ready = rows_dense
    else:
        # One pass for sums and maximum, then the cast, whose launch overlaps the end of the first.
        from ....common.kernels import cast as kernels
        from ....common.kernels import column_sums

        spec = cast.spec
        after = kernels.cast(
            request.shape,
            spec.element,
            spec.rowwise,
            spec.columnwise,
            follows=request.device.type == "cuda" and current_hardware().has("dependent launch"),
            power_of_two=spec.power_of_two,
            epsilon=spec.epsilon,
        )
        program = column_sums.sums_and_cast(
            request.shape, DTYPE_NAMES[request.result], after, _machine(request)
        )
        ready = methodcaller("contiguous")
    count = len(program.inputs)
    performed = Performed(program, request.device)

    def run(
        x: Tensor, multiplier: Tensor | None, record: Tensor | None
    ) -> tuple[Quantized, Tensor]:
        if interventions:
            fused_codes.report(request.shape, request.dtype, request.device, cast)
        *codes, sums = performed(*(ready(x), None, as_float32(multiplier), record)[:count])
        return Quantized(*codes), sums

    return run


BACKEND: Backend[ColumnSumsRequest] = Backend(
    "triton", unsupported_reason=unsupported_reason, bind=bind, opaque=True
)
