"""Quantization on NVIDIA GPUs by Triton kernels, bit-equal to the reference (NaN codes may differ in their sign).

Eager calls start the kernels directly; under torch.compile one registered operator keeps them opaque.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ....common.formats import E2M1, E4M3, E5M2
from ..launching import refuses_casts
from . import reference
from .formats import FORMATS
from .spec import Quantized, QuantizeSpec, Request, torch_dtype

ELEMENTS = {element.name: element for element in (E4M3, E5M2, E2M1)}
_LIMIT = 1 << 24  # offsets inside a tile of 128 rows are 32-bit integers


def refuses(request: Request) -> str | None:
    if (reason := refuses_casts(request.device, request.dtype)) is not None:
        return reason
    if max(request.shape) >= _LIMIT:
        return f"an extent of {list(request.shape)} reaches {_LIMIT}"
    if FORMATS[request.spec.format.name].plan is None:
        return f"there is no kernel for format {request.spec.format.name}"
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
    plan = FORMATS[spec.format.name].plan
    assert plan is not None, "refuses says so"
    request = Request(spec, (x.shape[0], x.shape[1]), x.dtype, x.device, scale is not None)
    return plan(request, amax is not None)(x, scale, amax, amax_t, record, random)


BACKEND = Backend[Request]("triton", run, refuses)


# What follows is torch.compile's view of `run`: one operator, returning the tensors that `run` makes.


def _traced(
    x: Tensor,
    spec: QuantizeSpec,
    scale: Tensor | None,
    amax: Tensor | None,
    amax_t: Tensor | None,
    random: tuple[Tensor, Tensor] | None,
) -> Quantized:
    form, maxima = spec.format, FORMATS[spec.format.name].maxima
    if maxima is not None:
        amax, amax_t = maxima(x, spec, amax, amax_t)
    random_rows, random_columns = (None, None) if random is None else random
    made = iter(
        torch.ops.transformer_engine.quantize(
            x,
            form.name,
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
    if form.block is None:
        inverse = next(made)
        amax = next(made) if amax is None else amax
        return Quantized(
            codes, inverse if spec.rowwise else None, codes_t, inverse if spec.columnwise else None, amax
        )
    decode = next(made) if spec.rowwise else None
    decode_t = next(made) if spec.columnwise else None
    if maxima is None:
        return Quantized(codes, decode, codes_t, decode_t)
    return Quantized(
        codes, decode, codes_t, decode_t, amax if spec.rowwise else None, amax_t if spec.columnwise else None
    )


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
        FORMATS[format].format,
        ELEMENTS[element],
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
    if spec.format.block is None:
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
    row, narrow = FORMATS[format], torch_dtype(ELEMENTS[element])
    codes = [x.new_empty((m, k // row.format.packing), dtype=narrow) for m, k in directions]
    if row.format.block is None:
        return codes + [x.new_empty(1, dtype=torch.float32) for _ in range(2 if amax is None else 1)]
    return codes + [row.new_scale(x, m, k) for m, k in directions]
