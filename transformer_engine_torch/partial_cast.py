"""Weight quantization from flat shards under the extension's names, as distributed optimizers call it.

A rank owns the elements start_offset .. start_offset + n in a flattened weight [h, w]. It computes the maxima over its
elements in each block, the caller reduces them over the ranks and computes scales, and the rank casts its elements.
`transformer_engine.pytorch.tensor.utils.quantize_master_weights` does all steps in one call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_engine.common.formats import E4M3, E5M2
from transformer_engine.common.numbers import to_int
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.primitives.quantize import (
    cast,
    e8m0_to_float,
    encode_e2m1,
    pack_fp4,
)

from .checks import member, values

__all__ = [
    "fp8_block_scaling_compute_partial_amax",
    "fp8_block_scaling_partial_cast",
    "mxfp8_scaling_compute_partial_amax",
    "mxfp8_scaling_partial_cast",
    "nvfp4_2d_compute_partial_amax",
    "nvfp4_2d_partial_cast",
]

_ELEMENTS = {DType.kFloat8E4M3: E4M3, DType.kFloat8E5M2: E5M2}
_MXFP8_BLOCK, _NVFP4_BLOCK = 32, 16


def _places(shard: Tensor, h: int, w: int, start_offset: int) -> tuple[Tensor, Tensor]:
    """Rows and columns for a shard's elements; raises ValueError if the shard exceeds the weight."""
    h, w, start = to_int("h", h, 0), to_int("w", w, 1), to_int("start_offset", start_offset, 0)
    if start + shard.numel() > h * w:
        raise ValueError(
            f"elements {start}:{start + shard.numel()} are outside of a weight [{h}, {w}]; check start_offset"
        )
    flat = torch.arange(start, start + shard.numel(), device=shard.device)
    return flat // w, flat % w


def _maxima(shard: Tensor, amax: Tensor, rows: Tensor, columns: Tensor) -> None:
    """Write the largest |x| per block to amax [.., ..], and 0 for blocks without shard elements."""
    maxima = torch.zeros(amax.numel(), dtype=torch.float32, device=amax.device)
    index = rows * amax.shape[1] + columns
    maxima.scatter_reduce_(0, index, shard.reshape(-1).float().abs(), "amax")
    amax.copy_(maxima.view(amax.shape))


def fp8_block_scaling_compute_partial_amax(
    tensor: Tensor, amax: Tensor, h: int, w: int, start_offset: int, block_len: int = 128
) -> None:
    """Compute a weight's maxima per block [block_len, block_len] over a shard's elements.

    Args:
        tensor: Shard, of any shape.
        amax: float32 [at least ceil(h / block_len), at least ceil(w / block_len)], overwritten.
        h: Rows of the weight.
        w: Columns of the weight.
        start_offset: First element of the shard.
        block_len: Rows and columns of a block.

    Raises:
        ValueError: The shard exceeds the weight.
    """
    values(tensor=tensor, amax=amax)
    rows, columns = _places(tensor, h, w, start_offset)
    _maxima(tensor, amax, rows // block_len, columns // block_len)


def fp8_block_scaling_partial_cast(
    inp: Tensor,
    out: Tensor,
    scale: Tensor,
    h: int,
    w: int,
    start_offset: int,
    block_len: int,
    out_dtype: DType | int,
) -> None:
    """Cast a shard to FP8: out = cast(inp * block scale).

    Args:
        inp: Shard, of any shape.
        out: Codes uint8 with the shard's number of elements, overwritten.
        scale: Block multipliers, float32, as `amax` in `fp8_block_scaling_compute_partial_amax`.
        h: Rows of the weight.
        w: Columns of the weight.
        start_offset: First element of the shard.
        block_len: Rows and columns of a block.
        out_dtype: kFloat8E4M3 or kFloat8E5M2.

    Raises:
        ValueError: The shard exceeds the weight, or the dtype is not FP8.
    """
    values(inp=inp, scale=scale)
    element = _ELEMENTS.get(member("out_dtype", DType, out_dtype))
    if element is None:
        raise ValueError(f"out_dtype={out_dtype!r} is not FP8; give kFloat8E4M3 or kFloat8E5M2")
    rows, columns = _places(inp, h, w, start_offset)
    codes = cast(inp.reshape(-1).float() * scale[rows // block_len, columns // block_len], element)
    out.view(-1).copy_(codes.view(torch.uint8))


def mxfp8_scaling_compute_partial_amax(
    input: Tensor,
    amax_rowwise: Tensor,
    amax_colwise: Tensor,
    rows: int,
    cols: int,
    start_offset: int,
) -> None:
    """Compute maxima per 32-element block in both directions over a shard's elements.

    Args:
        input: Shard, of any shape.
        amax_rowwise: [at least rows, at least cols / 32], overwritten.
        amax_colwise: [at least rows / 32, at least cols], overwritten.
        rows: Rows of the weight.
        cols: Columns of the weight.
        start_offset: First element of the shard.

    Raises:
        ValueError: The shard exceeds the weight.
    """
    values(input=input, amax_rowwise=amax_rowwise, amax_colwise=amax_colwise)
    row, column = _places(input, rows, cols, start_offset)
    _maxima(input, amax_rowwise, row, column // _MXFP8_BLOCK)
    _maxima(input, amax_colwise, row // _MXFP8_BLOCK, column)


def mxfp8_scaling_partial_cast(
    input: Tensor,
    output_rowwise: Tensor,
    output_colwise: Tensor,
    scale_inv_rowwise: Tensor,
    scale_inv_colwise: Tensor,
    rows: int,
    cols: int,
    start_offset: int,
) -> None:
    """Cast a shard to E4M3 with its block exponents in both directions.

    Args:
        input: Shard, of any shape.
        output_rowwise: Codes uint8 with the shard's number of elements, overwritten.
        output_colwise: Column-wise codes uint8, likewise.
        scale_inv_rowwise: Exponents uint8 [at least rows, at least cols / 32].
        scale_inv_colwise: Exponents uint8 [at least rows / 32, at least cols].
        rows: Rows of the weight.
        cols: Columns of the weight.
        start_offset: First element of the shard.

    Raises:
        ValueError: The shard exceeds the weight.
    """
    values(input=input)
    row, column = _places(input, rows, cols, start_offset)
    flat = input.reshape(-1).float()
    for output, exponents in (
        (output_rowwise, scale_inv_rowwise[row, column // _MXFP8_BLOCK]),
        (output_colwise, scale_inv_colwise[row // _MXFP8_BLOCK, column]),
    ):
        # 2^(127 - e), the inverse of the factor 2^(e - 127); NaN (255) stays NaN.
        inverse = e8m0_to_float(
            torch.where(exponents == 255, 255, 254 - exponents.int()).to(torch.uint8)
        )
        output.view(-1).copy_(cast(flat * inverse, E4M3).view(torch.uint8))


def nvfp4_2d_compute_partial_amax(
    tensor: Tensor, amax: Tensor, h: int, w: int, start_offset: int, block_len: int = _NVFP4_BLOCK
) -> None:
    """Compute a weight's maxima per block [16, 16]; see `fp8_block_scaling_compute_partial_amax`.

    Args:
        block_len: Rows and columns of a block.

    The other arguments are as in `fp8_block_scaling_compute_partial_amax`.

    Raises:
        ValueError: The shard exceeds the weight.
    """
    fp8_block_scaling_compute_partial_amax(tensor, amax, h, w, start_offset, block_len)


def nvfp4_2d_partial_cast(
    inp: Tensor,
    out: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    h: int,
    w: int,
    start_offset: int,
    block_len: int = _NVFP4_BLOCK,
) -> None:
    """Cast a shard to FP4: out = e2m1(inp / (e4m3(block scale) / global_scale)), two codes per byte.

    Args:
        inp: Shard with complete bytes, in any shape.
        out: uint8 with half the shard's number of elements, overwritten; the even element is in the low nibble.
        scale: Block factors in any floating-point dtype, rounded to E4M3 here, [at least ceil(h / block_len),
            at least ceil(w / block_len)].
        global_scale: 448 * 6 / the weight's amax, float32 [1].
        h: Rows of the weight.
        w: Columns of the weight.
        start_offset: First element of the shard.
        block_len: Rows and columns of a block.

    Raises:
        ValueError: The shard exceeds the weight, or has incomplete bytes.
    """
    values(inp=inp, scale=scale, global_scale=global_scale)
    if start_offset % 2 or inp.numel() % 2:
        raise ValueError(
            f"a shard of {inp.numel()} elements from {start_offset} cuts a byte of two codes; align shards to bytes"
        )
    rows, columns = _places(inp, h, w, start_offset)
    rounded = cast(scale.float(), E4M3).float()[rows // block_len, columns // block_len]
    factor = rounded * global_scale.float().reciprocal()
    multiplier = factor.reciprocal().clamp(max=torch.finfo(torch.float32).max)
    codes = pack_fp4(encode_e2m1(inp.reshape(-1).float() * multiplier))
    out.view(-1).copy_(codes)
