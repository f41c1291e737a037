"""FP8 codes that a kernel makes of its own result: what it is given, and the `Quantized` that becomes of it.

With one scale a tensor (`given`, `finished`), or with one a block, which needs no scale beforehand (`blocks`,
`in_blocks`, `in_row_blocks`).

Codes, scales and maxima are those of the separate steps: the result is rounded to its dtype before it is scaled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...common.formats import BLOCK_1D, BLOCK_2D, FLOAT8, FLOAT32_MAX
from . import quantize
from .quantize import Cast, Quantized, QuantizeSpec, Request
from .zeros import zero

if TYPE_CHECKING:
    from ...common.kernels.block_cast import Blocks

_FORMATS = (FLOAT8.name, BLOCK_1D.name, BLOCK_2D.name)


def fuses(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, cast: Cast) -> bool:
    """Would a kernel's own codes be those of `quantize`? One scale a tensor or a block, row-wise codes, by Triton.

    Observers hear of a quantization once: of a fused one from here, of another from `quantize`, which current scaling
    asks for its cast.
    """
    spec, delayed = cast.spec, cast.multiplier is not None
    if spec.format.name not in _FORMATS or not spec.rowwise or 0 in shape or torch.compiler.is_compiling():
        return False

    def describe() -> Request:
        return Request(spec, shape, dtype, device, delayed)

    if quantize.TABLE.prospect((spec, shape, dtype, device, delayed), describe).name != "triton":
        return False
    if delayed or in_blocks(spec):
        quantize.TABLE.report(describe)
    return True


def in_blocks(spec: QuantizeSpec) -> bool:
    """Has every block a scale of its own, so that a kernel that holds one needs to know nothing else?"""
    return spec.format.block is not None


def in_row_blocks(spec: QuantizeSpec) -> bool:
    """Are the blocks parts of rows, wanted for rows alone, so that a kernel that holds a row holds them?"""
    return spec.format == BLOCK_1D and not spec.columnwise


def blocks(spec: QuantizeSpec, dtype: torch.dtype) -> Blocks:
    """The spec as kernels take it, for a result that is rounded to dtype."""
    from ...common.kernels.block_cast import Blocks  # it imports triton

    return Blocks(
        spec.element,
        spec.columnwise,
        spec.format == BLOCK_2D,
        spec.power_of_two,
        spec.epsilon,
        min(torch.finfo(dtype).max, FLOAT32_MAX),
    )


def given(cast: Cast, device: torch.device) -> tuple[Tensor | None, Tensor]:
    """(the multiplier, where the maximum goes) as kernels take them; without a record a fresh 0."""
    _, scale, record = cast
    amax = zero(device) if record is None else record
    return scale if scale is None or scale.dtype is torch.float32 else scale.to(torch.float32), amax


def finished(made: Sequence[Tensor], scale: Tensor | None, amax: Tensor, spec: QuantizeSpec) -> Quantized:
    """From the outputs (codes, codes_t, scale_inv, values): the codes, or, without a scale, the cast of the values by
    the maximum that the kernel found."""
    codes, codes_t, inverse, values = made
    if scale is None:
        return quantize.quantize(values, spec, amax=amax)
    return Quantized(codes, inverse, codes_t, inverse if spec.columnwise else None, amax)
