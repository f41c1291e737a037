"""codes_t [K, M] = codes [M, K].T, contiguous, one byte per element: codes are moved, not changed.

There is no cast: codes of transposed values are the columnwise direction of a `QuantizeSpec`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...common.dispatch import Backend, Table
from ...common.kernels.launch import LARGEST_EXTENT
from ..fast.symbols import Symbol
from ..runtime.launching import operator, run, run_into, unsupported_elementwise
from .operand import Operand
from .quantize import pack_fp4, unpack_fp4

__all__ = [
    "TABLE",
    "TransposeRequest",
    "transposed_codes",
    "transposed_operand",
    "write_transposed",
]


class TransposeRequest(NamedTuple):
    """Codes [M, K]; native: they are a plain tensor, not of a subclass."""

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    contiguous: bool
    native: bool


def transposed_codes(codes: Tensor) -> Tensor:
    """Return codes [M, K] transposed to [K, M], contiguous."""
    native = torch.compiler.is_compiling() or type(codes) in (Tensor, Symbol)
    return TABLE.bound((codes.shape, codes.dtype, codes.device, codes.is_contiguous(), native))(
        codes
    )


def write_transposed(codes: Tensor, out: Tensor) -> None:
    """Write codes [M, K] transposed to out [K, M], contiguous, of the same dtype."""
    request = (codes.shape, codes.dtype, codes.device, codes.is_contiguous(), type(codes) is Tensor)
    if TABLE.name_of(request) == TRITON.name:
        from ...common.kernels import transpose

        code_bytes, out_bytes = codes.view(torch.uint8), out.view(torch.uint8)
        run_into(transpose.transpose((codes.shape[0], codes.shape[1])), (code_bytes,), [out_bytes])
    else:
        out.copy_(codes.t())


def transposed_operand(operand: Operand) -> Operand:
    """Return the operand of the transposed matrix, exact where square tiles share a scale: codes and scales only move.

    Where scales belong to rows, the scale of a square tile is repeated for each of its rows.
    """
    form, scale = operand.format, operand.scale
    assert form is not None and scale is not None
    if form.packing > 1:
        codes = pack_fp4(unpack_fp4(operand.codes).t().contiguous())
    else:
        codes = transposed_codes(operand.codes)
    if form.block is not None:
        rows_of_tile, side = form.block
        if rows_of_tile == side:
            scale = scale.t().contiguous()
        else:
            tiles = scale[::side].t()
            repeated = tiles.unsqueeze(1).expand(-1, side, -1).reshape(-1, tiles.shape[1])
            scale = repeated[: operand.depth]
    return operand._replace(codes=codes, scale=scale)


def unsupported_reason(request: TransposeRequest) -> str | None:
    """Return the reason why the kernel does not support a request, or None."""
    if request.dtype.itemsize != 1:
        return f"it moves codes of one byte, not {request.dtype}"
    if not request.native:
        return "the codes are not a plain tensor"
    if not request.contiguous or 0 in request.shape:
        return "the codes are not contiguous" if not request.contiguous else "the codes are empty"
    if max(request.shape) >= LARGEST_EXTENT:
        return f"an extent of {list(request.shape)} reaches {LARGEST_EXTENT}"
    return unsupported_elementwise(request.device)


def _bind_triton(request: TransposeRequest) -> Callable[[Tensor], Tensor]:
    """Bind a kernel that reaches 3.7 TB/s on an H200."""
    from ...common.kernels import transpose

    launch, dtype = transpose.transpose(request.shape), request.dtype
    return lambda codes: run(launch, (codes.view(torch.uint8),))[0].view(dtype)


TRITON: Backend[TransposeRequest] = Backend(
    "triton", unsupported_reason=unsupported_reason, bind=_bind_triton, opaque=True
)
REFERENCE: Backend[TransposeRequest] = Backend(
    "reference", bind=lambda request: lambda codes: codes.t().contiguous()
)
_operator = operator(
    "transposed_codes(Tensor codes) -> Tensor",
    transposed_codes,
    lambda codes: codes.new_empty((codes.shape[1], codes.shape[0])),
)
TABLE: Table[TransposeRequest] = Table(
    "transpose",
    (TRITON, REFERENCE),
    describe=TransposeRequest,
    operator=lambda request: _operator.given(),
)
