"""(quantize(dy [M, N]), dbias [N] = sum over rows of dy): on a GPU dy is read once for both."""

from __future__ import annotations

import torch
from torch import Tensor

from .activation import quantized
from .quantize import Quantized, QuantizeSpec, quantize


def quantize_with_dbias(
    x: Tensor,
    spec: QuantizeSpec,
    dbias: torch.dtype,
    *,
    scale: Tensor | None = None,
    record: Tensor | None = None,
) -> tuple[Quantized, Tensor]:
    """quantize(x, spec, scale=scale, record=record) and the sum over x's rows, made in float32, as dtype dbias."""
    if scale is not None and quantized.fuses(x, False, spec, scale):
        made, sums = quantized.backward("identity", x, None, None, spec, scale, record, dbias)
        assert sums is not None
        return made, sums
    return quantize(x, spec, scale=scale, record=record), x.sum(0, dtype=torch.float32).to(dbias)
