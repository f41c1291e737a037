"""codes, scale = quantize(x [M, K], spec); values = dequantize(operand)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from ....common.dispatch import Table
from .backends import REFERENCE, TRITON, dequantize
from .encodings import (
    absolute_maximum,
    cast,
    decode_e2m1,
    e8m0_from_float,
    e8m0_to_float,
    encode_e2m1,
    hadamard_transform,
    pack_fp4,
    scale_from_amax,
    unpack_fp4,
)
from .format_row import FormatRow, QuantizeInputs
from .formats import FORMATS
from .operator import make_operator
from .spec import Cast, CastRequest, Quantized, QuantizeRequest, QuantizeSpec, torch_dtype

__all__ = [
    "FORMATS",
    "TABLE",
    "Cast",
    "CastRequest",
    "FormatRow",
    "QuantizeRequest",
    "QuantizeSpec",
    "Quantized",
    "absolute_maximum",
    "cast",
    "decode_e2m1",
    "dequantize",
    "e8m0_from_float",
    "e8m0_to_float",
    "encode_e2m1",
    "hadamard_transform",
    "pack_fp4",
    "quantize",
    "quantize_as",
    "scale_from_amax",
    "torch_dtype",
    "unpack_fp4",
]


def quantize(
    x: Tensor,
    spec: QuantizeSpec,
    *,
    multiplier: Tensor | None = None,
    amax: Tensor | None = None,
    amax_t: Tensor | None = None,
    random: tuple[Tensor, Tensor] | None = None,
    record: Tensor | None = None,
) -> Quantized:
    """Quantize x [M, K] to codes and scales in the directions that spec requests.

    Args:
        x: Matrix [M, K], in high precision.
        spec: Target format and scaling.
        multiplier: FLOAT8: value multiplier, instead of one computed from their maximum. The scale
            is its inverse.
        amax: FLOAT8, NVFP4: the absolute maximum to use, for example one reduced over a group; [M] if the format has
            one scale per row.
        amax_t: NVFP4: the same for the columnwise direction.
        random: NVFP4, stochastic: uniform float32 in [0, 1), shaped [M, K] for the rowwise codes and [K, M] for the
            columnwise codes. With two_dimensional, the first is used for both, as the columnwise codes are a transpose.
        record: FLOAT8 with a given multiplier: float32 [1], which becomes the maximum of itself and max|x|. The
            result's amax is then this tensor. Unsupported while compiling, where only a base tensor can be written.
    """
    if spec.stochastic:
        _check_random(x, spec, random)
    key = (spec, x.shape, x.dtype, x.device, multiplier is not None, amax is not None)
    return TABLE.bound(key)(x, QuantizeInputs(multiplier, amax, amax_t, random, record))


def _check_random(x: Tensor, spec: QuantizeSpec, random: tuple[Tensor, Tensor] | None) -> None:
    """Raise ValueError unless stochastic rounding for x [M, K] gets one random number per element and direction."""
    if random is None:
        raise ValueError(
            "stochastic rounding needs random=(uniform [M, K], uniform [K, M]), float32 in [0, 1); it is None"
        )
    if len(x.shape) != 2:
        return
    rows, depth = x.shape
    reads_rows = spec.rowwise or spec.transposes
    if reads_rows and tuple(random[0].shape) != (rows, depth):
        raise ValueError(
            f"random[0] is {list(random[0].shape)}; draw one number per element, {[rows, depth]}"
        )
    if spec.columnwise and not spec.transposes and tuple(random[1].shape) != (depth, rows):
        raise ValueError(
            f"random[1] is {list(random[1].shape)}; draw one number per element, {[depth, rows]}"
        )


@overload
def quantize_as(x: Tensor, cast: Cast) -> Quantized: ...


@overload
def quantize_as(x: Tensor, cast: Cast | None) -> Tensor | Quantized: ...


def quantize_as(x: Tensor, cast: Cast | None) -> Tensor | Quantized:
    """Quantize x [M, K] by a cast; return x for None."""
    return (
        x
        if cast is None
        else quantize(x, cast.spec, multiplier=cast.multiplier, record=cast.record)
    )


def _make_request(
    spec: QuantizeSpec,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    multiplier_given: bool,
    amax_given: bool,
) -> QuantizeRequest:
    """Return the request for a key; raise ValueError or TypeError for a matrix that the format does not support."""
    if len(shape) != 2:
        raise ValueError(
            f"quantize takes a matrix [M, K], not {list(shape)}; flatten the leading axes"
        )
    if not dtype.is_floating_point:
        raise TypeError(f"quantize takes floating-point values, not {dtype}; convert them first")
    if multiplier_given and spec.format.block is not None:
        raise ValueError(
            f"a given multiplier belongs to format float8, not to {spec.format.name}; leave it out"
        )
    rows, depth = shape
    check = FORMATS[spec.format.name].check
    if check is not None:
        check(rows, depth, spec)
    return QuantizeRequest(spec, (rows, depth), dtype, device, multiplier_given, amax_given)


TABLE: Table[QuantizeRequest] = Table(
    "quantize",
    (TRITON, REFERENCE),
    describe=_make_request,
    operator=make_operator(quantize),
)
