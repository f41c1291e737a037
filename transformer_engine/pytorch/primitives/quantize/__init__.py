"""codes, scale = quantize(x [M, K], spec); values = dequantize(operand)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import overload

import torch
from torch import Tensor

from ....common.bounded import Bounded
from ....common.dispatch import Table, undisturbed
from . import reference, triton
from .dequantize import dequantize
from .e2m1 import decode_e2m1, encode_e2m1, pack_fp4, unpack_fp4
from .e8m0 import e8m0_from_float, e8m0_to_float
from .float8 import absolute_maximum, cast, scale_from_amax
from .format_row import FormatRow
from .formats import FORMATS
from .hadamard import hadamard_transform
from .spec import Cast, Quantized, QuantizeSpec, Request, torch_dtype

__all__ = [
    "FORMATS",
    "TABLE",
    "Cast",
    "FormatRow",
    "QuantizeSpec",
    "Quantized",
    "Request",
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

TABLE: Table[Request] = Table("quantize", (triton.BACKEND, reference.BACKEND))


def quantize(
    x: Tensor,
    spec: QuantizeSpec,
    *,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
    amax_t: Tensor | None = None,
    random: tuple[Tensor, Tensor] | None = None,
    record: Tensor | None = None,
) -> Quantized:
    """x [M, K] -> codes and scales of the directions that spec asks for.

    scale     FLOAT8: multiply by this instead of a scale made from the absolute maximum (delayed scaling)
    amax      FLOAT8, NVFP4: the absolute maximum to use, for example one reduced over a group
    amax_t    NVFP4: the same for the columnwise direction
    record    FLOAT8 with a given scale: float32 [1] that keeps the larger of itself and max|x|; the result's
              amax is then this tensor. Not while compiling, where a write has to go through its base tensor
    random    NVFP4, stochastic: uniform float32 in [0, 1), shaped [M, K] for the rowwise codes and [K, M] for
              the columnwise (two_dimensional: the first alone, the columnwise codes being its transpose)
    """
    if torch.compiler.is_compiling() or spec.stochastic or not undisturbed():
        _check(x, spec, scale, random)
        return TABLE.select(_request(x, spec, scale)).run(x, spec, scale, amax, amax_t, random, record)
    key = (spec, x.shape, x.dtype, x.device, scale is None, amax is None)
    call = _calls.get(key)
    if call is None:
        _check(x, spec, scale, random)
        call = _calls.keep(key, _chosen(x, spec, scale, amax))
    return call(x, scale, amax, amax_t, record)


@overload
def quantize_as(x: Tensor, cast: Cast) -> Quantized: ...


@overload
def quantize_as(x: Tensor, cast: Cast | None) -> Tensor | Quantized: ...


def quantize_as(x: Tensor, cast: Cast | None) -> Tensor | Quantized:
    """x [M, K] in the codes that a cast asks for; x where none is asked for."""
    return x if cast is None else quantize(x, cast.spec, scale=cast.multiplier, record=cast.record)


_calls: Bounded[Hashable, Callable[..., Quantized]] = Bounded(8192)


def _chosen(
    x: Tensor, spec: QuantizeSpec, scale: Tensor | None, amax: Tensor | None
) -> Callable[..., Quantized]:
    """What quantizes this matrix and every other of its shape, dtype and device."""
    request = _request(x, spec, scale)
    backend = TABLE.select(request)
    plan = FORMATS[spec.format.name].plan
    if backend is triton.BACKEND and plan is not None and x.numel():
        return plan(request, amax is not None)
    run = backend.run
    return lambda x, scale, amax, amax_t, record: run(x, spec, scale, amax, amax_t, None, record)


def _request(x: Tensor, spec: QuantizeSpec, scale: Tensor | None) -> Request:
    return Request(spec, (x.shape[0], x.shape[1]), x.dtype, x.device, scale is not None)


def _check(x: Tensor, spec: QuantizeSpec, scale: Tensor | None, random: tuple[Tensor, Tensor] | None) -> None:
    if x.dim() != 2:
        raise ValueError(f"quantize takes a matrix [M, K], not {list(x.shape)}; flatten the leading axes")
    if not x.is_floating_point():
        raise TypeError(f"quantize takes floating-point values, not {x.dtype}; convert them first")
    if scale is not None and spec.format.block is not None:
        raise ValueError(f"a given scale belongs to format float8, not to {spec.format.name}; leave it out")
    rows, depth = x.shape
    FORMATS[spec.format.name].check(rows, depth, spec)
    if spec.stochastic:
        _check_random(rows, depth, spec, random)


def _check_random(rows: int, depth: int, spec: QuantizeSpec, random: tuple[Tensor, Tensor] | None) -> None:
    if random is None:
        raise ValueError(
            "stochastic rounding needs random=(uniform [M, K], uniform [K, M]), float32 in [0, 1); it is None"
        )
    reads_rows = spec.rowwise or spec.transposes
    if reads_rows and tuple(random[0].shape) != (rows, depth):
        raise ValueError(f"random[0] is {list(random[0].shape)}; draw one number an element, {[rows, depth]}")
    if spec.columnwise and not spec.transposes and tuple(random[1].shape) != (depth, rows):
        raise ValueError(f"random[1] is {list(random[1].shape)}; draw one number an element, {[depth, rows]}")
