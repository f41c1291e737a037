"""Quantization of weights from flat shards under the extension's names, as distributed optimizers call it.

A rank owns the elements start_offset .. start_offset + n of a flattened weight [h, w]. It computes the maxima of its
elements in each block, the caller reduces them over the ranks and computes scales, and the rank casts its elements.
`transformer_engine.pytorch.tensor.utils.quantize_master_weights` does all of this in one call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_engine.common.formats import E4M3, E5M2
from transformer_engine.common.numbers import to_int
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.primitives.quantize import cast, e8m0_to_float, encode_e2m1, pack_fp4

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
    """Return the rows and columns of a shard's elements; raise ValueError if the shard exceeds the weight."""
    h, w, start = to_int("h", h, 0), to_int("w", w, 1), to_int("start_offset", start_offset, 0)
    if start + shard.numel() > h * w:
        raise ValueError(
            f"elements {start}:{start + shard.numel()} are outside of a weight [{h}, {w}]; check start_offset"
        )
    flat = torch.arange(start, start + shard.numel(), device=shard.device)
    return flat // w, flat % w


def _maxima(shard: Tensor, amax: Tensor, rows: Tensor, columns: Tensor) -> None:
    """Write the largest |x| of each block to amax [.., ..], and 0 for blocks without an element of the shard."""
    found = torch.zeros(amax.numel(), dtype=torch.float32, device=amax.device)
    index = rows * amax.shape[1] + columns
    found.scatter_reduce_(0, index, shard.reshape(-1).float().abs(), "amax")
    amax.copy_(found.view(amax.shape))


def fp8_block_scaling_compute_partial_amax(
    tensor: Tensor, amax: Tensor, h: int, w: int, start_offset: int, block_len: int = 128
) -> None:
    """Compute the maxima of the blocks [block_len, block_len] of a weight over the elements of a shard.

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
    """Cast a shard to FP8: out = cast(inp * scale of the block).

    Args:
        inp: Shard, of any shape.
        out: Codes uint8 with the shard's number of elements, overwritten.
        scale: Multipliers float32 of the blocks, as `amax` of `fp8_block_scaling_compute_partial_amax`.
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
    input: Tensor, amax_rowwise: Tensor, amax_colwise: Tensor, rows: int, cols: int, start_offset: int
) -> None:
    """Compute the maxima of blocks of 32 in both directions over the elements of a shard.

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
    input: Tensor, output_rowwise: Tensor, output_colwise: Tensor, scale_inv_rowwise: Tensor,
    scale_inv_colwise: Tensor, rows: int, cols: int, start_offset: int,
) -> None:  # fmt: skip
    """Cast a shard to E4M3 with the exponents of its blocks in both directions.

    Args:
        input: Shard, of any shape.
        output_rowwise: Codes uint8 with the shard's number of elements, overwritten.
        output_colwise: The same for the column direction.
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
        inverse = e8m0_to_float(torch.where(exponents == 255, 255, 254 - exponents.int()).to(torch.uint8))
        output.view(-1).copy_(cast(flat * inverse, E4M3).view(torch.uint8))


def nvfp4_2d_compute_partial_amax(
    tensor: Tensor, amax: Tensor, h: int, w: int, start_offset: int, block_len: int = _NVFP4_BLOCK
) -> None:
    """Compute the maxima of the blocks [16, 16] of a weight; see `fp8_block_scaling_compute_partial_amax`.

    Args:
        block_len: Rows and columns of a block.

    The other arguments are those of `fp8_block_scaling_compute_partial_amax`.

    Raises:
        ValueError: The shard exceeds the weight.
    """
    fp8_block_scaling_compute_partial_amax(tensor, amax, h, w, start_offset, block_len)


def nvfp4_2d_partial_cast(
    inp: Tensor, out: Tensor, scale: Tensor, global_scale: Tensor, h: int, w: int, start_offset: int,
    block_len: int = _NVFP4_BLOCK,
) -> None:  # fmt: skip
    """Cast a shard to FP4: out = e2m1(inp / (e4m3(scale of the block) / global_scale)), two codes in a byte.

    Args:
        inp: Shard of whole bytes, of any shape.
        out: uint8 with half the shard's number of elements, overwritten; the even element is in the low nibble.
        scale: Factors of the blocks in any floating-point dtype, rounded to E4M3 here, [at least ceil(h / block_len),
            at least ceil(w / block_len)].
        global_scale: 448 * 6 / amax of the weight, float32 [1].
        h: Rows of the weight.
        w: Columns of the weight.
        start_offset: First element of the shard.
        block_len: Rows and columns of a block.

    Raises:
        ValueError: The shard exceeds the weight, or does not consist of whole bytes.
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
