"""(quantize(dy [M, N]), dbias [N] = sum over rows of dy): on a GPU the sums come out of a pass that dy takes anyway."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...common.formats import FLOAT8
from .activation import quantized
from .column_sums import column_sums, sum_partials
from .launching import run
from .quantize import TABLE, Quantized, QuantizeSpec, Request, quantize
from .quantize.triton_float8 import launches
from .zeros import zero

if TYPE_CHECKING:
    from ...common.kernels.launch import Launch


def quantize_with_dbias(
    x: Tensor,
    spec: QuantizeSpec,
    dbias: torch.dtype,
    *,
    scale: Tensor | None = None,
    record: Tensor | None = None,
) -> tuple[Quantized, Tensor]:
    """quantize(x, spec, scale=scale, record=record) and the sum over x's rows, made in float32, as dtype dbias.

    A given scale, or one a block, lets the cast make the sums; one scale made from x lets the pass that finds max|x|.
    """
    if not quantized.fuses(x, False, spec, scale):
        return quantize(x, spec, scale=scale, record=record), column_sums(x, dbias)
    if scale is None and spec.format.name == FLOAT8.name:
        return _with_maximum(x.contiguous(), spec, dbias)
    made, sums = quantized.backward("identity", x, None, None, spec, scale, record, dbias)
    assert sums is not None
    return made, sums


def _with_maximum(x: Tensor, spec: QuantizeSpec, dbias: torch.dtype) -> tuple[Quantized, Tensor]:
    """Current scaling: a pass for sums and maximum, then the cast, which begins while the first one ends."""
    shape = (x.shape[0], x.shape[1])
    TABLE.report(lambda: Request(spec, shape, x.dtype, x.device, False))
    measure, cast = _launches(spec, shape, x.is_cuda)
    amax = zero(x.device)
    (partials,) = run(measure, (x, amax))
    codes, codes_t, inverse = run(cast, (x, None, amax))
    made = Quantized(codes, inverse, codes_t, inverse if spec.columnwise else None, amax)
    return made, sum_partials(partials, dbias)


@functools.lru_cache(maxsize=1024)
def _launches(spec: QuantizeSpec, shape: tuple[int, int], overlaps: bool) -> tuple[Launch, Launch]:
    from ...common.kernels import column_sums  # it imports triton

    _, cast = launches(spec, *shape, scale_given=False, amax_given=False, overlaps=overlaps)
    return column_sums.column_sums(shape, shape[1], overlaps=overlaps), cast
