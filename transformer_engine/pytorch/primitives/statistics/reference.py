"""The statistics request, and the reference in torch operations: float32 values, float64 sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ....common.formats import E2M1, TensorFormat
from ..operand import Operand
from ..quantize import dequantize
from ..quantize.encodings import decode_e2m1, unpack_fp4


class StatisticsRequest(NamedTuple):
    """One matrix [M, K], and its code layout if it is quantized.

    Attributes:
        format: Code format; None: the matrix was not quantized.
        element: Code dtype.
        codes: Code strides.
        scales: Scale strides; () for one scale.
    """

    shape: tuple[int, int]
    strides: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    format: TensorFormat | None = None
    element: torch.dtype | None = None
    codes: tuple[int, int] = (0, 0)
    scales: tuple[int, ...] = ()


_FOUR_BITS = (E2M1.maximum, 2.0**-E2M1.mantissa_bits)  # of two codes in a byte


def bind(request: StatisticsRequest) -> Callable[[Tensor, Operand | None, Tensor], None]:
    """Return (x, operand, kept) -> None, which adds the statistics to kept."""

    def measure(x: Tensor, operand: Operand | None, accumulated: Tensor) -> None:
        values = x.float()
        finite = values.isfinite()
        values = torch.where(finite, values, 0.0)
        signal = values.double().square().sum()
        none = torch.zeros((), dtype=torch.float64, device=x.device)
        underflow = saturation = noise = none
        if operand is not None:
            packed = operand.codes.dtype == torch.uint8
            codes = decode_e2m1(unpack_fp4(operand.codes)) if packed else operand.codes.float()
            quantized = dequantize(operand._replace(dtype=torch.float32))
            underflow = ((values != 0) & (codes == 0)).sum()
            largest, beyond = greatest(operand.codes.dtype)
            saturation = (
                (codes.abs() == largest) & (values.abs() > quantized.abs() * beyond)
            ).sum()
            noise = torch.where(finite, values - quantized, 0.0).double().square().sum()
        sums = torch.stack(
            [t.double() for t in (underflow, saturation, signal, noise, (~finite).sum())]
        )
        accumulated[0] = torch.maximum(
            accumulated[0], values.abs().amax().double() if values.numel() else none
        )
        accumulated[1:] += sums

    return measure


class Greatest(NamedTuple):
    """Magnitude of the largest code, and its multiple above which a value is half a step beyond."""

    code: float
    beyond: float


def greatest(element: torch.dtype) -> Greatest:
    """Return the largest code of a dtype."""
    if element == torch.uint8:
        largest, step = _FOUR_BITS
    else:
        largest, step = torch.finfo(element).max, torch.finfo(element).eps
    half_a_step = 2.0 ** math.floor(math.log2(largest)) * step / 2
    return Greatest(largest, 1 + half_a_step / largest)


BACKEND: Backend[StatisticsRequest] = Backend("reference", bind=bind)
