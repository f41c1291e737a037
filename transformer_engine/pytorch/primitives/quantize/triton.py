"""Quantization on NVIDIA GPUs by Triton kernels, bit-equal to the reference (NaN codes may differ in their sign).

Eager calls start the kernels directly; under torch.compile one registered operator keeps them opaque.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ....common.formats import (
    BLOCK_1D,
    E2M1,
    E4M3,
    E5M2,
    FLOAT8,
    MXFP8,
    NVFP4,
    TENSOR_FORMATS,
    ceil_div,
)
from ....common.kernels.launch import Launch
from ...device import is_current_device
from .. import launching
from ..launching import refuses_casts
from . import reference
from .float8 import absolute_maximum
from .hadamard import hadamard_transform
from .spec import Quantized, QuantizeSpec, Request
from .triton_float8 import as_float32, call_of
from .triton_tiles import tiled_call

ELEMENTS = (E4M3, E5M2, E2M1)
_LIMIT = 1 << 24  # offsets inside a tile of 128 rows are 32-bit integers


def refuses(request: Request) -> str | None:
    if (reason := refuses_casts(request.device, request.dtype)) is not None:
        return reason
    if max(request.shape) >= _LIMIT:
        return f"an extent of {list(request.shape)} reaches {_LIMIT}"
    return None


def run(
    x: Tensor,
    spec: QuantizeSpec,
    scale: Tensor | None,
    amax: Tensor | None,
    amax_t: Tensor | None,
    random: tuple[Tensor, Tensor] | None,
    record: Tensor | None = None,
) -> Quantized:
    """x [M, K] -> the directions that spec asks for."""
    if torch.compiler.is_compiling():
        return _traced(x, spec, scale, amax, amax_t, random)
    if x.numel() == 0:
        return reference.run(x, spec, scale, amax, amax_t, random, record)
    if spec.format.name == FLOAT8.name:
        call = call_of(spec, (x.shape[0], x.shape[1]), x.device, scale is not None, amax is not None)
        return call(x, scale, amax, record)
    if spec.format.name != NVFP4.name:
        return tiled_call(spec, (x.shape[0], x.shape[1]), x.dtype, x.device)(x)
    device = x.device.index
    if not is_current_device(device):
        with torch.cuda.device(device):
            return _nvfp4(x.contiguous(), spec, amax, amax_t, random)
    return _nvfp4(x.contiguous(), spec, amax, amax_t, random)


BACKEND = Backend[Request]("triton", run, refuses)


@functools.cache
def _kernels() -> SimpleNamespace:
    """The kernel files, which import triton."""
    from ....common.kernels import cast, nvfp4

    return SimpleNamespace(cast=cast, nvfp4=nvfp4)


def _nvfp4(
    x: Tensor,
    spec: QuantizeSpec,
    amax: Tensor | None,
    amax_t: Tensor | None,
    random: tuple[Tensor, Tensor] | None,
) -> Quantized:
    kernels = _kernels()
    shape = (x.shape[0], x.shape[1])
    if amax is None and (spec.rowwise or not spec.hadamard):
        (amax,) = launching.run(kernels.cast.absolute_maximum(x.numel()), (x,))
    if not spec.columnwise or spec.transposes:
        amax_t = amax
    elif amax_t is None and spec.hadamard:
        (amax_t,) = launching.run(kernels.nvfp4.transformed_maximum(shape, spec.random_sign), (x,))
    elif amax_t is None:
        amax_t = amax
    random_rows, random_columns = random if spec.stochastic and random is not None else (None, None)
    if spec.transposes and random_rows is not None:
        random_columns = random_rows.t()
    quantization: Launch = kernels.nvfp4.blocks(
        shape,
        spec.rowwise,
        spec.columnwise,
        square=spec.two_dimensional,
        hadamard=spec.hadamard,
        random_sign=spec.random_sign,
    )
    uniform = [None if values is None else values.contiguous() for values in (random_rows, random_columns)]
    inputs = (x, as_float32(amax), as_float32(amax_t), *uniform)
    codes, decode, codes_t, decode_t = launching.run(quantization, inputs)
    return Quantized(
        codes, decode, codes_t, decode_t, amax if spec.rowwise else None, amax_t if spec.columnwise else None
    )


# What follows is torch.compile's view of `run`: one operator, returning the tensors that `run` makes.


def _traced(
    x: Tensor,
    spec: QuantizeSpec,
    scale: Tensor | None,
    amax: Tensor | None,
    amax_t: Tensor | None,
    random: tuple[Tensor, Tensor] | None,
) -> Quantized:
    if spec.format.name == NVFP4.name:
        amax, amax_t = _nvfp4_maxima(x, spec, amax, amax_t)
    random_rows, random_columns = (None, None) if random is None else random
    made = iter(
        torch.ops.transformer_engine.quantize(
            x,
            spec.format.name,
            spec.element.name,
            spec.rowwise,
            spec.columnwise,
            spec.power_of_two,
            spec.epsilon,
            spec.two_dimensional,
            spec.hadamard,
            spec.random_sign,
            spec.stochastic,
            scale,
            amax,
            amax_t,
            random_rows,
            random_columns,
        )
    )
    codes = next(made) if spec.rowwise else None
    codes_t = next(made) if spec.columnwise else None
    if spec.format.name == FLOAT8.name:
        inverse = next(made)
        amax = next(made) if amax is None else amax
        return Quantized(
            codes, inverse if spec.rowwise else None, codes_t, inverse if spec.columnwise else None, amax
        )
    decode = next(made) if spec.rowwise else None
    decode_t = next(made) if spec.columnwise else None
    if spec.format.name != NVFP4.name:
        return Quantized(codes, decode, codes_t, decode_t)
    return Quantized(
        codes, decode, codes_t, decode_t, amax if spec.rowwise else None, amax_t if spec.columnwise else None
    )


def _nvfp4_maxima(
    x: Tensor, spec: QuantizeSpec, amax: Tensor | None, amax_t: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    if amax is None and (spec.rowwise or not spec.hadamard):
        amax = absolute_maximum(x)
    if not spec.columnwise or spec.transposes:
        return amax, amax
    if amax_t is None:
        amax_t = absolute_maximum(hadamard_transform(x.t(), spec.random_sign)) if spec.hadamard else amax
    return amax, amax_t


@torch.library.custom_op("transformer_engine::quantize", mutates_args=())
def _operator(
    x: Tensor,
    format: str,
    element: str,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    epsilon: float,
    two_dimensional: bool,
    hadamard: bool,
    random_sign: bool,
    stochastic: bool,
    scale: Tensor | None,
    amax: Tensor | None,
    amax_t: Tensor | None,
    random_rows: Tensor | None,
    random_columns: Tensor | None,
) -> list[Tensor]:
    spec = QuantizeSpec(
        next(known for known in TENSOR_FORMATS if known.name == format),
        next(known for known in ELEMENTS if known.name == element),
        rowwise,
        columnwise,
        power_of_two,
        epsilon,
        two_dimensional,
        hadamard,
        random_sign,
        stochastic,
    )
    random = None if random_rows is None or random_columns is None else (random_rows, random_columns)
    made = run(x, spec, scale, amax, amax_t, random)
    results = [made.codes, made.codes_t]
    if format == FLOAT8.name:
        # An operator's results share no storage, with each other or with what it was given.
        results += [made.scale if rowwise else made.scale_t]
        results += [made.amax.clone()] if amax is None and made.amax is not None else []
    else:
        results += [made.scale, made.scale_t]
    return [result for result in results if result is not None]


@_operator.register_fake
def _operator_shapes(
    x: Tensor,
    format: str,
    element: str,
    rowwise: bool,
    columnwise: bool,
    power_of_two: bool,
    epsilon: float,
    two_dimensional: bool,
    hadamard: bool,
    random_sign: bool,
    stochastic: bool,
    scale: Tensor | None,
    amax: Tensor | None,
    amax_t: Tensor | None,
    random_rows: Tensor | None,
    random_columns: Tensor | None,
) -> list[Tensor]:
    rows, depth = x.shape
    directions = [(rows, depth)] * rowwise + [(depth, rows)] * columnwise
    narrow = torch.float8_e4m3fn if element == E4M3.name else torch.float8_e5m2
    if format == FLOAT8.name:
        scalars = [x.new_empty(1, dtype=torch.float32) for _ in range(2 if amax is None else 1)]
        return [x.new_empty(shape, dtype=narrow) for shape in directions] + scalars
    if format == NVFP4.name:
        codes = [x.new_empty((m, k // 2), dtype=torch.uint8) for m, k in directions]
        return codes + [x.new_empty((m, ceil_div(k, 16)), dtype=torch.float8_e4m3fn) for m, k in directions]
    codes = [x.new_empty(shape, dtype=narrow) for shape in directions]
    if format == MXFP8.name:
        return codes + [x.new_empty((m, ceil_div(k, 32)), dtype=torch.uint8) for m, k in directions]
    if format == BLOCK_1D.name:
        return codes + [x.new_empty((ceil_div(k, 128), m), dtype=torch.float32).t() for m, k in directions]
    return codes + [
        x.new_empty((ceil_div(m, 128), ceil_div(k, 128)), dtype=torch.float32) for m, k in directions
    ]
