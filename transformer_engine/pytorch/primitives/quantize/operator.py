"""The operator of `quantize` for torch.compile, opaque to the compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....common.dispatch import Operator
from ....common.formats import E2M1, E4M3, E5M2
from ...runtime import launching
from ..scale_order import swizzled_shape
from .format_row import QuantizeInputs
from .formats import FORMATS
from .spec import Quantized, QuantizeRequest, QuantizeSpec, torch_dtype

_ELEMENTS = {element.name: element for element in (E4M3, E5M2, E2M1)}
_OPTIONS = {
    "rowwise": "bool",
    "columnwise": "bool",
    "power_of_two": "bool",
    "epsilon": "float",
    "two_dimensional": "bool",
    "hadamard": "bool",
    "random_sign": "bool",
    "stochastic": "bool",
    "four_over_six": "str",
    "tiled": "bool",
}
_SCHEMA = (
    "quantize(Tensor x, str format, str element, "
    + ", ".join(f"{kind} {name}" for name, kind in _OPTIONS.items())
    + ", Tensor? multiplier, Tensor? amax, Tensor? amax_t, Tensor? random_rows, Tensor? random_columns) -> Tensor[]"
)


def make_operator(quantize: Callable[..., Quantized]) -> Callable[[QuantizeRequest], Operator]:
    """(request) -> the operator that runs quantize(x, spec, ...), for `Table`."""

    def now(x: Tensor, format: str, element: str, *rest: Any) -> list[Tensor]:
        options, (multiplier, amax, amax_t, *random) = rest[: len(_OPTIONS)], rest[len(_OPTIONS) :]
        spec = QuantizeSpec(FORMATS[format].format, _ELEMENTS[element], *options)
        drawn = None if random[0] is None or random[1] is None else tuple(random)
        # Results share no storage with each other or with the arguments.
        quantized = quantize(x, spec, multiplier=multiplier, amax=amax, amax_t=amax_t, random=drawn)
        results = [quantized.codes, quantized.codes_t]
        if spec.format.block is None:
            results += [quantized.scale if spec.rowwise else quantized.scale_t]
            results += (
                [quantized.amax.clone()] if amax is None and quantized.amax is not None else []
            )
        else:
            results += [quantized.scale, quantized.scale_t]
        return [result for result in results if result is not None]

    operator = launching.operator(_SCHEMA, now, _results)

    def request_operator(request: QuantizeRequest) -> Operator:
        return Operator(
            functools.partial(_as_operator, operator.call, request.spec),
            functools.partial(_as_operator, operator.results, request.spec),
        )

    return request_operator


def _results(
    x: Tensor,
    format: str,
    element: str,
    rowwise: bool,
    columnwise: bool,
    *rest: Any,
) -> list[Tensor]:
    rows, depth = x.shape
    amax = rest[len(_OPTIONS) - 2 + 1]
    directions = [(rows, depth)] * rowwise + [(depth, rows)] * columnwise
    row, narrow = FORMATS[format], torch_dtype(_ELEMENTS[element])
    codes = [x.new_empty((m, k // row.format.packing), dtype=narrow) for m, k in directions]
    if row.format.block is None:
        return codes + [
            x.new_empty(1, dtype=torch.float32) for _ in range(2 if amax is None else 1)
        ]
    scales = [row.new_scale(x, m, k) for m, k in directions]
    if rest[len(_OPTIONS) - 3]:  # the last option, tiled
        scales = [x.new_empty(swizzled_shape(*scale.shape), dtype=scale.dtype) for scale in scales]
    return codes + scales


def _as_operator(
    operator: Callable[..., list[Tensor]],
    spec: QuantizeSpec,
    x: Tensor,
    inputs: QuantizeInputs,
) -> Quantized:
    """Return the result of `quantize` from the operator's results; record is None, because a graph writes it."""
    multiplier, amax, amax_t, random, _ = inputs
    form, maxima = spec.format, FORMATS[spec.format.name].maxima
    if maxima is not None:
        amax, amax_t = maxima(x, spec, amax, amax_t)
    random_rows, random_columns = (None, None) if random is None else random
    results = iter(
        operator(
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
            spec.four_over_six,
            spec.tiled,
            multiplier,
            amax,
            amax_t,
            random_rows,
            random_columns,
        )
    )
    codes = next(results) if spec.rowwise else None
    codes_t = next(results) if spec.columnwise else None
    if form.block is None:
        inverse = next(results)
        amax = next(results) if amax is None else amax
        return Quantized(
            codes,
            inverse if spec.rowwise else None,
            codes_t,
            inverse if spec.columnwise else None,
            amax,
        )
    decode = next(results) if spec.rowwise else None
    decode_t = next(results) if spec.columnwise else None
    if maxima is None:
        return Quantized(codes, decode, codes_t, decode_t)
    return Quantized(
        codes,
        decode,
        codes_t,
        decode_t,
        amax if spec.rowwise else None,
        amax_t if spec.columnwise else None,
    )
