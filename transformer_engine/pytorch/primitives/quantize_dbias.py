"""(quantize(dy [M, N]), dbias [N] = sum over rows of dy): on a GPU the sums come out of a pass that dy takes anyway."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .activation import quantized
from .column_sums import column_sums
from .launching import DTYPE_NAMES, perform
from .quantize import TABLE, Cast, Quantized, QuantizeSpec, Request, quantize
from .quantize.triton_float8 import launches

if TYPE_CHECKING:
    from ...common.kernels.program import Program


def quantize_with_dbias(x: Tensor, cast: Cast, dbias: torch.dtype) -> tuple[Quantized, Tensor]:
    """The codes of x that a cast asks for, and the sum over x's rows, made in float32, as dtype dbias.

    A given multiplier, or one a block: the cast makes the sums; one scale made from x: the pass that finds max|x|.
    """
    spec, scale, record = cast
    if not quantized.fuses(x, False, cast):
        return quantize(x, spec, scale=scale, record=record), column_sums(x, dbias)
    if scale is None and spec.format.block is None:
        return _with_maximum(x.contiguous(), spec, dbias)
    made, sums = quantized.backward("identity", x, None, None, cast, dbias)
    assert sums is not None
    return made, sums


def _with_maximum(x: Tensor, spec: QuantizeSpec, dbias: torch.dtype) -> tuple[Quantized, Tensor]:
    """Current scaling: a pass for sums and maximum, then the cast, which begins while the first one ends."""
    shape = (x.shape[0], x.shape[1])
    TABLE.report(lambda: Request(spec, shape, x.dtype, x.device, False))
    sums, codes, codes_t, inverse, amax = perform(_program(spec, shape, dbias, x.is_cuda), (x,))
    return Quantized(codes, inverse, codes_t, inverse if spec.columnwise else None, amax), sums


@functools.lru_cache(maxsize=1024)
def _program(spec: QuantizeSpec, shape: tuple[int, int], dbias: torch.dtype, overlaps: bool) -> Program:
    from ...common.kernels import column_sums  # it imports triton

    _, cast = launches(spec, *shape, scale_given=False, amax_given=False, overlaps=overlaps)
    return column_sums.sums_and_cast(shape, DTYPE_NAMES[dbias], cast)
