"""The activations on GPUs: x and dy are read once, and y, dx or the codes of a cast are written once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....common.dispatch import Backend, interventions
from ....common.kernels.launch import LARGEST_EXTENT, Machine
from ...runtime import launching
from ...runtime.device import current_hardware
from ...runtime.launching import DTYPE_NAMES, Performed, rows_dense, run, unsupported_elementwise
from ..column_sums import column_sums
from ..quantize import CastRequest, Quantized, fused_codes
from ..quantize.format_row import as_float32
from .reference import with_cast, with_output
from .request import ActivationRequest, MeasuredGradient

_HALVES = 256  # two halves, each in whole blocks


def unsupported_reason(request: ActivationRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    return unsupported_elementwise(request.device, request.dtype)


def bind(request: ActivationRequest) -> Callable[..., Any]:
    """Return x -> f(x) or (dy, x) -> dx; with a cast, (.., multiplier, record) -> the codes, and column sums of dx."""
    cast = request.cast
    if request.output is not None:
        if recomputes(request):
            return _backward_and_output(request)
        rest = request._replace(output=None, encoded=False)
        return with_output(
            request, bind(rest), _forward(rest._replace(backward=False, dy=None, cast=None))
        )
    if cast is not None and fuses(request, cast):
        return _backward_codes(request, cast) if request.backward else _forward_codes(request, cast)
    return with_cast(
        request, _backward(request) if request.backward else _forward(request), column_sums
    )


def fuses(request: ActivationRequest, cast: CastRequest) -> bool:
    """Return whether the kernel writes the codes; blocks of a gate's gradient must end where the other half begins."""
    if (
        not cast.inside
        or len(request.shape) != 2
        or max(request.shape[1], request.strides[0]) >= LARGEST_EXTENT
    ):
        return False
    if not request.backward:
        return True
    if request.gated and fused_codes.has_block_scales(cast.spec) and request.shape[1] % _HALVES:
        return False
    return fused_codes.gradient_fuses(cast.spec, request.dbias is not None)


def recomputes(request: ActivationRequest) -> bool:
    """Return whether one kernel computes dx and the codes of f(x): one scale per tensor, which is known."""
    cast, spec = request.cast, request.output
    assert spec is not None
    if not request.shape.numel() or max(request.shape[1], request.strides[0]) >= LARGEST_EXTENT:
        return False
    if cast is not None and not (cast.inside and cast.given and cast.records):
        return False
    if request.device.type == "cuda" and not current_hardware().has("fp8 casts"):
        return False  # dx and f(x) have codes of two dtypes; see `conversion`
    return not fused_codes.has_block_scales(spec)


def _forward(request: ActivationRequest) -> Callable[[Tensor], Tensor]:
    shape, width = request.shape, _result_columns(request)
    out = torch.Size((*shape[:-1], width)) if shape else shape
    if shape.numel() == 0:
        return lambda x: x.new_empty(out)
    from ....common.kernels import activation

    rows, stride = _rows(shape, request.strides)
    launch = activation.forward(
        request.name,
        request.gated,
        rows,
        width,
        stride,
        DTYPE_NAMES[request.dtype],
        request.constants,
    )
    if len(shape) == 2:
        return lambda x: run(launch, (rows_dense(x),))[0]
    return lambda x: run(launch, (_matrix(x),))[0].view(out)


def _backward(request: ActivationRequest) -> Callable[[Tensor, Tensor], Tensor]:
    shape, width = request.shape, _result_columns(request)
    if shape.numel() == 0:
        return lambda dy, x: x.new_empty(shape)
    from ....common.kernels import activation

    assert request.dy is not None
    rows, stride = _rows(shape, request.strides)
    dy_shape = torch.Size((*shape[:-1], width)) if shape else shape
    _, dy_stride = _rows(dy_shape, request.dy[0])
    launch = activation.backward(
        request.name,
        request.gated,
        rows,
        width,
        (dy_stride, stride),
        DTYPE_NAMES[request.dtype],
        request.constants,
    )
    if len(shape) == 2:
        return lambda dy, x: run(launch, (rows_dense(dy), rows_dense(x)))[0]
    return lambda dy, x: run(launch, (_matrix(dy), _matrix(x)))[0].view(shape)


def _result_columns(request: ActivationRequest) -> int:
    """Return the number of columns of f(x)."""
    width = request.shape[-1] if request.shape else 1
    return width // 2 if request.gated else width


def _rows(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, int]:
    """(rows, row stride in elements) of `_matrix` for a tensor with this shape and these strides."""
    if not shape:
        return 1, 1
    matrix = _matrix(torch.empty_strided(shape, strides, device="meta"))
    return matrix.shape[0], matrix.stride(0)


def _matrix(x: Tensor) -> Tensor:
    """Return x as [rows, width] with contiguous columns; a copy only if no view has that form."""
    return rows_dense(x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1))


def _machine(request: ActivationRequest, bytes_read: int) -> Machine:
    processors = launching.processors(request.device.index)
    return Machine(*processors, bytes_read, current_hardware().threads)


def _forward_codes(
    request: ActivationRequest, cast: CastRequest
) -> Callable[[Tensor, Tensor | None, Tensor | None], Quantized]:
    """Return x [M, F] or [M, 2F] -> quantize(y [M, F])."""
    from ....common.kernels import activation_codes

    shape, stride = request.made, _rows(request.shape, request.strides)[1]
    plain = (request.name, request.gated, shape, stride)
    if fused_codes.has_block_scales(cast.spec):
        bytes_read = (2 if request.gated else 1) * request.dtype.itemsize
        machine = _machine(request, bytes_read)
        blocks = fused_codes.blocks(cast.spec, request.dtype)
        program = activation_codes.forward_blocks(*plain, request.constants, blocks, machine)
    else:
        how = fused_codes.one_scale(cast)
        program = activation_codes.forward(
            *plain, DTYPE_NAMES[request.dtype], request.constants, how
        )
    count, performed = len(program.inputs), Performed(program, request.device)

    def run(x: Tensor, multiplier: Tensor | None, record: Tensor | None) -> Quantized:
        if interventions:
            fused_codes.report(shape, request.dtype, request.device, cast)
        return Quantized(*performed(*(rows_dense(x), as_float32(multiplier), record)[:count]))

    return run


def _backward_codes(
    request: ActivationRequest, cast: CastRequest
) -> Callable[[Tensor, Tensor, Tensor | None, Tensor | None], tuple[Quantized, Tensor | None]]:
    """Return the function that computes quantize(dx [M, N]) and its column sums [N]."""
    from ....common.kernels import activation_codes

    assert request.dy is not None
    dy_strides, dy_dtype = request.dy
    rows, width = request.shape[0], _result_columns(request)
    strides = (
        _rows(torch.Size((rows, width)), dy_strides)[1],
        _rows(request.shape, request.strides)[1],
    )
    plain = (request.name, request.gated, (rows, width), strides)
    sums = None if request.dbias is None else DTYPE_NAMES[request.dbias]
    if fused_codes.has_block_scales(cast.spec):
        bytes_read = dy_dtype.itemsize + (2 if request.gated else 1) * request.dtype.itemsize
        machine = _machine(request, bytes_read)
        blocks = fused_codes.blocks(cast.spec, request.dtype)
        program = activation_codes.backward_blocks(*plain, request.constants, blocks, sums, machine)
    else:
        how = fused_codes.one_scale(cast)
        program = activation_codes.backward(
            *plain, DTYPE_NAMES[request.dtype], request.constants, how, sums
        )
    count, performed = len(program.inputs), Performed(program, request.device)

    def run(
        dy: Tensor, x: Tensor, multiplier: Tensor | None, record: Tensor | None
    ) -> tuple[Quantized, Tensor | None]:
        if interventions:
            fused_codes.report(request.made, request.dtype, request.device, cast)
        operands = (rows_dense(dy), rows_dense(x), as_float32(multiplier), record)
        *codes, sums = performed(*operands[:count])
        return Quantized(*codes), sums

    return run


def _backward_and_output(
    request: ActivationRequest,
) -> Callable[..., tuple[MeasuredGradient | Quantized, Quantized]]:
    """Return the function from `reference.with_output` as one kernel."""
    from ....common.kernels import activation_recompute as kernels

    assert request.dy is not None and request.output is not None
    shape, cast, spec = (
        torch.Size((request.shape[0], _result_columns(request))),
        request.cast,
        request.output,
    )
    strides = (_rows(shape, request.dy[0])[1], _rows(request.shape, request.strides)[1])
    program = kernels.backward(
        request.name,
        request.gated,
        (shape[0], shape[1]),
        strides,
        DTYPE_NAMES[request.dtype],
        request.constants,
        None if cast is None else cast.spec.element,
        cast is not None and cast.spec.columnwise,
        kernels.OutputCodes(spec.element, spec.power_of_two, spec.epsilon),
        request.encoded,
    )
    performed = Performed(program, request.device)

    def run(
        dy: Tensor, x: Any, *scalings: Tensor | None
    ) -> tuple[MeasuredGradient | Quantized, Quantized]:
        multiplier, record, output_multiplier, output_amax = scalings
        of_output = (as_float32(output_multiplier), output_amax)
        matrices = (
            (rows_dense(dy), x.codes, _column_major(x.scale))
            if request.encoded
            else (rows_dense(dy), rows_dense(x))
        )
        if cast is None:
            dx, amax, codes_t, scale = performed(*matrices, *of_output)
            return MeasuredGradient(dx, amax), Quantized(codes_t=codes_t, scale_t=scale)
        if interventions:
            fused_codes.report(request.made, request.dtype, request.device, cast)
        operands = (*matrices, as_float32(multiplier), record, *of_output)
        *codes, codes_t, scale = performed(*operands)
        return Quantized(*codes), Quantized(codes_t=codes_t, scale_t=scale)

    return run


def _column_major(scale: Tensor) -> Tensor:
    """Scales [M, blocks] as the cast's kernel writes them; the reference's scales are copied."""
    return scale if scale.stride(0) == 1 else scale.t().contiguous().t()


BACKEND: Backend[ActivationRequest] = Backend(
    "triton", unsupported_reason=unsupported_reason, bind=bind, opaque=True
)
