"""The norms on GPUs: one pass over x and y forward, over x, dy and dx backward, and repeatable sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....common.dispatch import Backend, interventions
from ...runtime import launching
from ...runtime.launching import DTYPE_NAMES, Performed, rows_dense, run, unsupported_elementwise
from ..quantize import CastRequest, Quantized, fused_codes
from ..quantize.format_row import as_float32
from .reference import NormRequest, with_cast

if TYPE_CHECKING:
    from ....common.kernels.norm import NormRows
    from ....common.kernels.program import Program

_WIDEST_CENTERED = 4096  # largest width for which a LayerNorm writes block codes


def unsupported_reason(request: NormRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    return unsupported_elementwise(request.device, request.dtype, request.weight_dtype)


def bind(request: NormRequest) -> Callable[..., Any]:
    """Return a callable with the same arguments and results as `reference.bind`."""
    if request.operation.endswith("backward"):
        return _backward(request)
    if request.cast is not None and fuses(request, request.cast):
        return _codes(request, request.cast)
    return with_cast(request, _forward(request))


def fuses(request: NormRequest, cast: CastRequest) -> bool:
    """Return whether the kernel of the norm writes the codes.

    Blocks in both directions need 128-row tiles, and hence read x again after the statistics.

    H200, 8192 x 4096 bfloat16: 0.0245 ms for RMSNorm's statistics and 0.058 for tiles against 0.082
    for separate steps. Blocks along rows only: RMSNorm 0.036 against 0.065, LayerNorm 0.039 against
    0.067. With wider rows LayerNorm's kernel runs out of registers (0.100 against 0.084 at 5120),
    and its statistics differ in the last bit from a norm without codes.
    """
    narrow = not request.centered or request.shape[1] <= _WIDEST_CENTERED
    if fused_codes.has_block_scales(cast.spec) and not (
        narrow and fused_codes.has_blocks_in_rows(cast.spec)
    ):
        return False
    return cast.inside


def _forward(request: NormRequest) -> Callable[..., tuple[Tensor, ...]]:
    """Return (x, weight, bias) -> y, mean, rstdev, or (x, weight) -> y, rstdev."""
    if request.shape[0] == 0:
        return empty_layernorm if request.centered else empty_rmsnorm
    from ....common.kernels import norm

    launch = norm.forward(_rows(request))

    def layernorm(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        bias = None if bias is None else bias.contiguous()
        return tuple(run(launch, (rows_dense(x), weight.contiguous(), bias, None, None))[2:])

    def rmsnorm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        _, _, y, _, rstdev = run(launch, (rows_dense(x), weight.contiguous(), None, None, None))
        return y, rstdev

    return layernorm if request.centered else rmsnorm


def _rows(request: NormRequest) -> NormRows:
    from ....common.kernels.norm import NormRows

    rows, width = request.shape
    processors = launching.processors(request.device.index)
    stride, dtype = _row_stride(request.shape, request.strides), DTYPE_NAMES[request.dtype]
    return NormRows(
        rows,
        width,
        stride,
        dtype,
        request.eps,
        request.zero_centered,
        request.centered,
        *processors,
    )


def _row_stride(shape: tuple[int, int], strides: tuple[int, ...]) -> int:
    """Return the row stride of `rows_dense` for a matrix."""
    return strides[0] if strides[1] == 1 else shape[1]


def _codes(request: NormRequest, cast: CastRequest) -> Callable[..., tuple[Any, ...]]:
    """Return (x, weight, [bias], multiplier, record) -> the codes of y, from the kernel of y, [mean], rstdev."""
    from ....common.kernels import norm_codes

    if fused_codes.has_block_scales(cast.spec):
        blocks = fused_codes.blocks(cast.spec, request.dtype)
        program = norm_codes.row_blocks(_rows(request), blocks)
    else:
        program = norm_codes.one_scale(_rows(request), fused_codes.one_scale(cast))
    count = len(program.inputs)
    performed = Performed(program, request.device)

    def made(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        multiplier: Tensor | None,
        record: Tensor | None,
    ) -> tuple[Quantized, Tensor, Tensor]:
        if interventions:
            fused_codes.report(request.shape, request.dtype, request.device, cast)
        bias = None if bias is None else bias.contiguous()
        operands = (rows_dense(x), weight.contiguous(), bias, as_float32(multiplier), record)
        *codes, mean, rstdev = performed(*operands[:count])
        return Quantized(*codes), mean, rstdev

    def rmsnorm(
        x: Tensor, weight: Tensor, multiplier: Tensor | None, record: Tensor | None
    ) -> tuple[Quantized, Tensor]:
        codes, _, rstdev = made(x, weight, None, multiplier, record)
        return codes, rstdev

    return made if request.centered else rmsnorm


def _backward(request: NormRequest) -> Callable[..., tuple[Tensor, ...]]:
    """Return (dy, x, [mean], rstdev, weight, add) -> dx, dweight, [dbias], where [..] belongs to a LayerNorm."""
    if request.shape[0] == 0:
        if request.centered:
            return lambda dy, x, mean, rstdev, weight, add: (
                torch.empty_like(x),
                torch.zeros_like(weight),
                torch.zeros_like(weight),
            )
        return lambda dy, x, rstdev, weight, add: (torch.empty_like(x), torch.zeros_like(weight))
    performed = Performed(backward_program(request), request.device)

    def layernorm(
        dy: Tensor, x: Tensor, mean: Tensor, rstdev: Tensor, weight: Tensor, add: Tensor | None
    ) -> tuple[Tensor, ...]:
        added = None if add is None else rows_dense(add)
        return tuple(
            performed(rows_dense(dy), rows_dense(x), added, weight.contiguous(), mean, rstdev)
        )

    def rmsnorm(
        dy: Tensor, x: Tensor, rstdev: Tensor, weight: Tensor, add: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        added = None if add is None else rows_dense(add)
        dx, dweight, _ = performed(
            rows_dense(dy), rows_dense(x), added, weight.contiguous(), None, rstdev
        )
        return dx, dweight

    return layernorm if request.centered else rmsnorm


def backward_program(request: NormRequest) -> Program:
    """Return the launches of a backward pass, and the buffer for their column sums."""
    from ....common.kernels import norm

    assert request.dy is not None

    matrices = (request.dy, (request.strides, request.dtype), request.add)
    strides = tuple(0 if m is None else _row_stride(request.shape, m[0]) for m in matrices)
    bytes_read = sum(0 if m is None else m[1].itemsize for m in matrices)
    return norm.backward(
        *request.shape,
        strides,  # pyright: ignore[reportArgumentType]
        DTYPE_NAMES[request.dtype],
        DTYPE_NAMES[request.weight_dtype],
        request.zero_centered,
        request.centered,
        bytes_read,
        *launching.processors(request.device.index),
        rounds_first=request.rounds_first,
    )


def empty_layernorm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 0.0, zero_centered: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate y, mean, rstdev."""
    y, rstdev = empty_rmsnorm(x, weight)
    return y, torch.empty_like(rstdev), rstdev


def empty_rmsnorm(
    x: Tensor, weight: Tensor, eps: float = 0.0, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """Allocate y, rstdev."""
    return x.new_empty(x.shape), x.new_empty(x.shape[:1], dtype=torch.float32)


BACKEND: Backend[NormRequest] = Backend(
    "triton", unsupported_reason=unsupported_reason, bind=bind, opaque=True
)
