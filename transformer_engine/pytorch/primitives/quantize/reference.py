"""Every format in plain torch operations: float32, literal, on any device, for any request."""

from __future__ import annotations

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ....common.formats import FLOAT8, MXFP8, NVFP4
from . import block, float8, mxfp8, nvfp4, tiles
from .e2m1 import pack_fp4
from .float8 import absolute_maximum, scale_from_amax
from .hadamard import hadamard_transform
from .spec import Quantized, QuantizeSpec, Request


def refuses(request: Request) -> str | None:
    """Never."""
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
    if spec.format.name == FLOAT8.name:
        quantized = _float8(x, spec, scale, amax)
        if record is None or quantized.amax is None:
            return quantized
        record.copy_(torch.maximum(record, quantized.amax.reshape(record.shape)))
        return quantized._replace(amax=record)
    if spec.format.name == NVFP4.name:
        return _nvfp4(x, spec, amax, amax_t, random)
    return _tiled(x, spec)


def _transposed(matrix: Tensor) -> Tensor:
    # Not contiguous(): it would keep [K, 1] with strides (1, K), which cannot be viewed as another dtype.
    return matrix.t().clone(memory_format=torch.contiguous_format)


def _float8(x: Tensor, spec: QuantizeSpec, scale: Tensor | None, amax: Tensor | None) -> Quantized:
    if amax is None:
        amax = absolute_maximum(x)
    if scale is None:
        scale = scale_from_amax(
            amax, spec.element.maximum, power_of_two=spec.power_of_two, epsilon=spec.epsilon
        )
    codes = float8.encode(x, spec.element, scale).contiguous()
    codes_t = _transposed(codes) if spec.columnwise else None
    inverse = scale.to(torch.float32).reciprocal()
    return Quantized(
        codes=codes if spec.rowwise else None,
        scale=inverse if spec.rowwise else None,
        codes_t=codes_t,
        scale_t=inverse if spec.columnwise else None,
        amax=amax,
    )


def _tiled(x: Tensor, spec: QuantizeSpec) -> Quantized:
    """BLOCK and MXFP8: a tile knows nothing of the rest of the matrix."""
    encode = mxfp8.encode if spec.format.name == MXFP8.name else block.encode
    codes = scale = codes_t = scale_t = None
    if spec.rowwise or spec.transposes:
        codes, scale = encode(x, spec)
    if spec.columnwise:
        if codes is not None and scale is not None and spec.transposes:
            codes_t, scale_t = _transposed(codes), _transposed(scale)
        else:
            codes_t, scale_t = encode(_transposed(x), spec)
    return Quantized(
        codes=codes if spec.rowwise else None,
        scale=_a_row(scale, spec, x.shape[0]) if spec.rowwise else None,
        codes_t=codes_t,
        scale_t=_a_row(scale_t, spec, x.shape[1]),
    )


def _a_row(scale: Tensor | None, spec: QuantizeSpec, rows: int) -> Tensor | None:
    """A 2-D variant of a format whose scales belong to rows repeats a tile's scale on its rows."""
    if scale is None or not spec.two_dimensional or spec.tile is None:
        return scale
    return tiles.repeat_rows(scale, spec.tile[0], rows)


def _nvfp4(
    x: Tensor,
    spec: QuantizeSpec,
    amax: Tensor | None,
    amax_t: Tensor | None,
    random: tuple[Tensor, Tensor] | None,
) -> Quantized:
    random_rows, random_columns = random if spec.stochastic and random is not None else (None, None)
    codes = scale = codes_t = scale_t = None
    if amax is None and (spec.rowwise or not spec.hadamard):
        amax = absolute_maximum(x)
    if amax is not None and (spec.rowwise or spec.transposes):
        codes, scale = nvfp4.encode(x, spec, amax, random_rows)
    if spec.columnwise:
        if codes is not None and scale is not None and spec.transposes:
            codes_t, scale_t, amax_t = _transposed(codes), _transposed(scale), amax
        else:
            x_t = _transposed(x)
            if spec.hadamard:
                x_t = hadamard_transform(x_t, spec.random_sign)
            if amax_t is None:
                amax_t = absolute_maximum(x_t) if spec.hadamard else amax
            assert amax_t is not None
            codes_t, scale_t = nvfp4.encode(x_t, spec, amax_t, random_columns)
    return Quantized(
        codes=pack_fp4(codes) if spec.rowwise and codes is not None else None,
        scale=_a_row(scale, spec, x.shape[0]) if spec.rowwise else None,
        codes_t=None if codes_t is None else pack_fp4(codes_t),
        scale_t=_a_row(scale_t, spec, x.shape[1]),
        amax=amax if spec.rowwise else None,
        amax_t=amax_t if spec.columnwise else None,
    )


BACKEND = Backend[Request]("reference", run, refuses)
