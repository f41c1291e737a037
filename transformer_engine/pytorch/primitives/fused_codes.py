"""FP8 codes that a kernel makes of its own result: what it is given to write, and the `Quantized` that becomes of it.

With one scale a tensor (`target`, `finished`), or with one a block, which needs no scale beforehand (`blocks`,
`in_blocks`, `in_row_blocks`, `of_blocks`).

Codes, scales and maxima are those of the separate steps: the result is rounded to its dtype before it is scaled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...common.formats import BLOCK_1D, BLOCK_2D, FLOAT8, FLOAT32_MAX
from . import quantize
from .quantize import Quantized, QuantizeSpec, Request, torch_dtype
from .zeros import zero

if TYPE_CHECKING:
    from ...common.kernels.block_cast import Blocks
    from ...common.kernels.launch import Launch

_FORMATS = (FLOAT8.name, BLOCK_1D.name, BLOCK_2D.name)


class Float8Target(NamedTuple):
    """What a kernel with FP8 results takes beside its own tensors; all None but amax where there is no scale."""

    scale: Tensor | None
    amax: Tensor | None
    codes: Tensor | None
    codes_t: Tensor | None
    inverse: Tensor | None


def fuses(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, spec: QuantizeSpec, delayed: bool
) -> bool:
    """Would a kernel's own codes be those of `quantize`? One scale a tensor or a block, row-wise codes, by Triton.

    Observers hear of a quantization once: of a fused one from here, of another from `quantize`, which current scaling
    asks for its cast.
    """
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
    return spec.format.name == BLOCK_1D.name and not spec.columnwise


def blocks(spec: QuantizeSpec, dtype: torch.dtype) -> Blocks:
    """The spec as kernels take it, for a result that is rounded to dtype."""
    from ...common.kernels.block_cast import Blocks  # it imports triton

    return Blocks(
        spec.element,
        spec.columnwise,
        spec.format.name == BLOCK_2D.name,
        spec.power_of_two,
        spec.epsilon,
        min(torch.finfo(dtype).max, FLOAT32_MAX),
    )


def of_blocks(launch: Launch, made: list[Tensor]) -> Quantized:
    """From the first four outputs of a kernel of `block_fused`."""
    return Quantized(
        *[
            tensor.t() if output is not None and output.transposed else tensor
            for output, tensor in zip(launch.outputs[:4], made, strict=False)
        ]
    )


def target(
    shape: tuple[int, int],
    spec: QuantizeSpec,
    scale: Tensor | None,
    record: Tensor | None,
    device: torch.device,
) -> Float8Target:
    """For [M, K] results; without a scale (current scaling) only the maximum is kept, and the caller casts."""
    amax = zero(device) if record is None else record
    if scale is None:
        return Float8Target(None, amax, None, None, None)
    dtype = torch_dtype(spec.element)
    return Float8Target(
        scale if scale.dtype is torch.float32 else scale.to(torch.float32),
        amax,
        torch.empty(shape, dtype=dtype, device=device),
        torch.empty((shape[1], shape[0]), dtype=dtype, device=device) if spec.columnwise else None,
        torch.empty(1, dtype=torch.float32, device=device),
    )


def finished(made: Float8Target, y: Tensor | None, spec: QuantizeSpec) -> Quantized:
    """The result of a kernel that was given this target: its codes, or the cast of y by the maximum it found."""
    if made.codes is None:
        assert y is not None
        return quantize.quantize(y, spec, amax=made.amax)
    return Quantized(
        made.codes, made.inverse, made.codes_t, made.inverse if spec.columnwise else None, made.amax
    )
