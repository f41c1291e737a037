"""NVFP4 quantization steps with 16 x 16 blocks under the extension's names, on one weight or on weight lists.

A weight [h, w] has ceil(h / 16) x ceil(w / 16) blocks. The blocks' largest magnitudes `block_amax` and the
weight's `global_amax` determine the second-level scale S = 448 * 6 / global_amax and the block scales
s = block_amax / 6 * S; a code is e2m1(x * S / e4m3(s)). Distributed optimizers reduce the maxima over the ranks before
they compute scales. `transformer_engine.pytorch.tensor.utils.quantize_master_weights` does all steps in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common.formats import E2M1, E4M3, float32_max
from transformer_engine.common.numbers import to_int
from transformer_engine.pytorch.primitives.quantize import cast
from transformer_engine.pytorch.primitives.quantize import quantize as quantize_matrix
from transformer_engine.pytorch.primitives.quantize.encodings import second_level_scale
from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor, stack_quantizer
from transformer_engine.pytorch.tensor.storage.grouped_layout import GroupLayout, varying_extents
from transformer_engine.pytorch.tensor.storage.grouped_tensor_storage import GroupedTensorStorage
from transformer_engine.pytorch.tensor.storage.quantized_tensor_storage import plain_matrix

from .checks import sequence, values
from .group_cast import Extents, member_shapes
from .grouped import nvfp4_data_transpose
from .partial_cast import nvfp4_2d_compute_partial_amax, nvfp4_2d_partial_cast

__all__ = [
    "nvfp4_2d_multi_tensor_transpose",
    "nvfp4_2d_scale_transpose",
    "nvfp4_compute_global_scale",
    "nvfp4_compute_per_block_scale",
    "nvfp4_expand_scale_to_fp8",
    "nvfp4_fused_scale",
    "nvfp4_group_quantize_with_amax",
    "nvfp4_multi_tensor_2d_partial_cast",
    "nvfp4_multi_tensor_compute_partial_amax",
    "nvfp4_multi_tensor_fused_scale",
    "nvfp4_quantize_with_amax",
]

_BLOCK = 16  # rows and columns that share a scale


def nvfp4_compute_global_scale(global_amax: Tensor, global_scale: Tensor) -> None:
    """Compute S = 448 * 6 / global_amax, at most the largest float32; 1 for maximum 0.

    Args:
        global_amax: Largest magnitudes, float32 of any shape.
        global_scale: float32 in the same shape, overwritten.
    """
    values(global_amax=global_amax, global_scale=global_scale)
    global_scale.copy_(_second_level(global_amax).view(global_scale.shape))


def _second_level(global_amax: Tensor) -> Tensor:
    return second_level_scale(global_amax.float(), E4M3.maximum * E2M1.maximum)


def nvfp4_compute_per_block_scale(block_amax: Tensor, scale: Tensor, global_amax: Tensor) -> None:
    """Compute the block scales s = block_amax * (S / 6) in float32, before they are rounded to E4M3.

    `nvfp4_2d_partial_cast` and `nvfp4_expand_scale_to_fp8` round them.

    Args:
        block_amax: Largest magnitude per block, float32.
        scale: float32 in the same shape, overwritten.
        global_amax: The weight's largest magnitude, float32 [1].
    """
    values(block_amax=block_amax, scale=scale, global_amax=global_amax)
    factor = _second_level(global_amax.reshape(1)) * (1.0 / E2M1.maximum)
    scale.copy_((block_amax.float() * factor).clamp(max=float32_max()).view(scale.shape))


def nvfp4_expand_scale_to_fp8(
    input: Tensor,
    output: Tensor,
    tile_rows: int,
    tile_cols: int,
    rows_padded: int,
    block_len: int = _BLOCK,
) -> None:
    """Round block scales to E4M3 and repeat each for its block's rows; padding has scale 0.

    Args:
        input: Block scales float32 [at least tile_rows, at least tile_cols].
        output: uint8 [rows_padded, at least tile_cols], overwritten.
        tile_rows: Blocks along the rows.
        tile_cols: Blocks along the columns.
        rows_padded: Rows of `output`.
        block_len: Rows of a block.

    Raises:
        ValueError: A tensor is smaller than the numbers of blocks.
    """
    values(input=input)
    _check_minimum("input", input, tile_rows, tile_cols)
    _check_minimum("output", output, rows_padded, tile_cols)
    codes = cast(input[:tile_rows, :tile_cols].float(), E4M3).view(torch.uint8)
    rows = codes.repeat_interleave(to_int("block_len", block_len, 1), 0)[:rows_padded]
    output.zero_()
    output.view(torch.uint8)[: rows.shape[0], :tile_cols] = rows


def nvfp4_fused_scale(
    block_amax: Tensor,
    global_amax: Tensor,
    per_block_scale: Tensor,
    target_scale: Tensor,
    target_amax: Tensor,
    tile_rows: int,
    tile_cols: int,
    rows_padded: int,
    block_len: int = _BLOCK,
) -> None:
    """Compute the block scales, their E4M3 copies for each row, and the quantized weight's maximum.

    Args:
        block_amax: Largest magnitude per block, float32 [tile_rows, tile_cols].
        global_amax: The weight's largest magnitude, float32 [1].
        per_block_scale: As `scale` of `nvfp4_compute_per_block_scale`.
        target_scale: As `output` of `nvfp4_expand_scale_to_fp8`.
        target_amax: float32 [1], overwritten with `global_amax`.
        tile_rows: See `nvfp4_expand_scale_to_fp8`.
        tile_cols: See `nvfp4_expand_scale_to_fp8`.
        rows_padded: See `nvfp4_expand_scale_to_fp8`.
        block_len: See `nvfp4_expand_scale_to_fp8`.
    """
    nvfp4_compute_per_block_scale(block_amax, per_block_scale, global_amax)
    nvfp4_expand_scale_to_fp8(
        per_block_scale, target_scale, tile_rows, tile_cols, rows_padded, block_len
    )
    target_amax.copy_(global_amax.reshape(target_amax.shape))


def nvfp4_2d_scale_transpose(input: Tensor, output: Tensor, M_tiles: int, K_tiles: int) -> None:
    """Compute the transposed weight's E4M3 scales from the weight's scales; padding has scale 0.

    Args:
        input: uint8 [at least 16 M_tiles - 15, at least K_tiles]: equal scales for the 16 rows in a block.
        output: uint8 [at least K, at least M_tiles] for the transposed weight [K, M], overwritten.
        M_tiles: Blocks along the weight's rows.
        K_tiles: Blocks along the weight's columns.

    Raises:
        ValueError: A tensor is smaller than the numbers of blocks.
    """
    _check_minimum("input", input, _BLOCK * (M_tiles - 1) + 1, K_tiles)
    _check_minimum("output", output, _BLOCK * (K_tiles - 1) + 1, M_tiles)
    blocks = input.view(torch.uint8)[: _BLOCK * M_tiles : _BLOCK, :K_tiles]
    rows = blocks.t().repeat_interleave(_BLOCK, 0)[: output.shape[0]]
    output.zero_()
    output.view(torch.uint8)[: rows.shape[0], :M_tiles] = rows


def _check_minimum(name: str, matrix: Tensor, rows: int, columns: int) -> None:
    if matrix.dim() != 2 or matrix.shape[0] < rows or matrix.shape[1] < columns:
        raise ValueError(
            f"{name} is {list(matrix.shape)}; give a matrix of at least [{rows}, {columns}]"
        )


def nvfp4_2d_multi_tensor_transpose(
    rowwise_data_list: Sequence[Tensor],
    columnwise_data_list: Sequence[Tensor],
    rowwise_scale_inv_list: Sequence[Tensor],
    columnwise_scale_inv_list: Sequence[Tensor],
    M_list: Sequence[int],
    K_list: Sequence[int],
) -> None:
    """Transpose codes and block scales for several weights [M, K].

    Args:
        rowwise_data_list: Codes uint8 [M, K / 2].
        columnwise_data_list: Codes uint8 [K, M / 2], overwritten.
        rowwise_scale_inv_list: See `input` of `nvfp4_2d_scale_transpose`.
        columnwise_scale_inv_list: See `output` of `nvfp4_2d_scale_transpose`.
        M_list: Rows per weight.
        K_list: Columns per weight.
    """
    for codes, codes_t, scale, scale_t, m, k in _each(
        rowwise_data_list=rowwise_data_list,
        columnwise_data_list=columnwise_data_list,
        rowwise_scale_inv_list=rowwise_scale_inv_list,
        columnwise_scale_inv_list=columnwise_scale_inv_list,
        M_list=M_list,
        K_list=K_list,
    ):
        nvfp4_data_transpose(codes.view(m, k // 2), codes_t.view(k, m // 2))
        nvfp4_2d_scale_transpose(scale, scale_t, -(-m // _BLOCK), -(-k // _BLOCK))


def nvfp4_multi_tensor_fused_scale(
    block_amax_list: Sequence[Tensor],
    global_amax_list: Sequence[Tensor],
    per_block_scale_list: Sequence[Tensor],
    target_scale_list: Sequence[Tensor],
    target_amax_list: Sequence[Tensor],
    tile_rows_list: Sequence[int],
    tile_cols_list: Sequence[int],
    rows_padded_list: Sequence[int],
    block_len: int = _BLOCK,
) -> None:
    """Run `nvfp4_fused_scale` on several weights.

    Args:
        block_amax_list: `block_amax` per weight.
        global_amax_list: `global_amax` per weight.
        per_block_scale_list: `per_block_scale` per weight.
        target_scale_list: `target_scale` per weight.
        target_amax_list: `target_amax` per weight.
        tile_rows_list: `tile_rows` per weight.
        tile_cols_list: `tile_cols` per weight.
        rows_padded_list: `rows_padded` per weight.
        block_len: Rows of a block.
    """
    for arguments in _each(
        block_amax_list=block_amax_list,
        global_amax_list=global_amax_list,
        per_block_scale_list=per_block_scale_list,
        target_scale_list=target_scale_list,
        target_amax_list=target_amax_list,
        tile_rows_list=tile_rows_list,
        tile_cols_list=tile_cols_list,
        rows_padded_list=rows_padded_list,
    ):
        nvfp4_fused_scale(*arguments, block_len=block_len)


def nvfp4_multi_tensor_compute_partial_amax(
    master_weight_list: Sequence[Tensor],
    partial_amax_list: Sequence[Tensor],
    global_amax_list: Sequence[Tensor],
    h_list: Sequence[int],
    w_list: Sequence[int],
    start_offset_list: Sequence[int],
    block_len: int = _BLOCK,
) -> None:
    """Compute per-block and global maxima for several weights over their shards' elements.

    Args:
        master_weight_list: Shards; see `nvfp4_2d_compute_partial_amax`.
        partial_amax_list: Its `amax`, overwritten.
        global_amax_list: float32 [1], overwritten with the shard's largest magnitude, 0 for an empty shard.
        h_list: Rows per weight.
        w_list: Columns per weight.
        start_offset_list: First element per shard.
        block_len: Rows and columns of a block.
    """
    for shard, amax, largest, h, w, start in _each(
        master_weight_list=master_weight_list,
        partial_amax_list=partial_amax_list,
        global_amax_list=global_amax_list,
        h_list=h_list,
        w_list=w_list,
        start_offset_list=start_offset_list,
    ):
        nvfp4_2d_compute_partial_amax(shard, amax, h, w, start, block_len)
        largest.copy_(amax.max().reshape(largest.shape))


def nvfp4_multi_tensor_2d_partial_cast(
    inp_list: Sequence[Tensor],
    out_list: Sequence[Tensor],
    scale_list: Sequence[Tensor],
    global_scale_list: Sequence[Tensor],
    h_list: Sequence[int],
    w_list: Sequence[int],
    start_offset_list: Sequence[int],
    block_len: int = _BLOCK,
) -> None:
    """Cast shards from several weights to FP4; see `nvfp4_2d_partial_cast`.

    Each shard has the four tensors for one call; weights may have several shards in the lists.

    Args:
        inp_list: Shards with complete bytes.
        out_list: Codes uint8, two in a byte, overwritten.
        scale_list: Block scales, which are rounded to E4M3.
        global_scale_list: Second-level scales, float32 [1].

    The other arguments are as in `nvfp4_multi_tensor_compute_partial_amax`.
    """
    for arguments in _each(
        inp_list=inp_list,
        out_list=out_list,
        scale_list=scale_list,
        global_scale_list=global_scale_list,
        h_list=h_list,
        w_list=w_list,
        start_offset_list=start_offset_list,
    ):
        nvfp4_2d_partial_cast(*arguments, block_len=block_len)


def _each(**lists: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The arguments for each weight; ValueError, before any is used, unless the lists are equally long."""
    for name, tensors in lists.items():
        sequence(name, tensors)
    if len({len(tensors) for tensors in lists.values()}) > 1:
        lengths = ", ".join(f"{name} has {len(tensors)}" for name, tensors in lists.items())
        raise ValueError(f"{lengths}; give one entry per weight in each list")
    return list(zip(*lists.values(), strict=True))


def nvfp4_quantize_with_amax(
    tensor: Tensor,
    quantizer: Any,
    rowwise_amax: Tensor | None = None,
    columnwise_amax: Tensor | None = None,
) -> Any:
    """Quantize a tensor to NVFP4 with given maxima.

    Args:
        tensor: Values [.., K].
        quantizer: NVFP4Quantizer without stochastic rounding.
        rowwise_amax: float32 [1], the maximum of the row-wise direction; measured if None.
        columnwise_amax: float32 [1], likewise column-wise.

    Raises:
        ValueError: The quantizer rounds stochastically.
    """
    if quantizer.stochastic_rounding:
        raise ValueError(
            "nvfp4_quantize_with_amax draws no random numbers; set stochastic_rounding=False"
        )
    spec = quantizer.spec(quantizer.rowwise_usage, quantizer.columnwise_usage)
    storage = quantize_matrix(
        plain_matrix(tensor.detach()), spec, amax=rowwise_amax, amax_t=columnwise_amax
    )
    return quantizer.wrap(quantizer._packed(storage, tensor.shape, tensor.dtype))


def nvfp4_group_quantize_with_amax(
    tensor: Tensor,
    quantizer: Any,
    num_tensors: int,
    first_dims: Extents,
    last_dims: Extents = None,
    rowwise_amax: Tensor | None = None,
    columnwise_amax: Tensor | None = None,
    tensor_offsets: Tensor | None = None,
) -> GroupedTensor:
    """Quantize a group's matrices to NVFP4 with known maxima; the host reads their shapes.

    Args:
        tensor: Values [total rows, K]; see `group_quantize`, also for the shapes.
        quantizer: NVFP4Quantizer without stochastic rounding.
        num_tensors: Number of matrices.
        first_dims: Rows of each matrix; None if they are equal.
        last_dims: Columns of each matrix; None if they are equal.
        rowwise_amax: float32 [num_tensors], the row-wise maxima; measured if None.
        columnwise_amax: float32 [num_tensors], likewise column-wise.
        tensor_offsets: First element of each matrix and the end, int64 [num_tensors + 1].

    Raises:
        ValueError: The shapes or maxima do not fit `num_tensors`, or the quantizer rounds stochastically.
    """
    maxima = []
    for name, amax in (("rowwise_amax", rowwise_amax), ("columnwise_amax", columnwise_amax)):
        if amax is not None and amax.numel() != num_tensors:
            raise ValueError(
                f"{name} has {amax.numel()} maxima for num_tensors={num_tensors}; give one per matrix"
            )
        maxima.append([None] * num_tensors if amax is None else amax.reshape(-1).split(1))
    x = tensor.detach().reshape(prod(tensor.shape[:-1]), tensor.shape[-1])
    shapes, firsts, lasts = member_shapes(x, num_tensors, first_dims, last_dims)
    members, begin = [], 0
    for (rows, columns), amax, amax_t in zip(shapes, *maxima, strict=True):
        matrix = x.reshape(-1)[begin : begin + rows * columns].view(rows, columns)
        members.append(nvfp4_quantize_with_amax(matrix, quantizer, amax, amax_t).as_storage())
        begin += rows * columns
    varies = (firsts is not None, lasts is not None)
    stack = stack_quantizer(quantizer, shapes, stacked=not any(varies))
    group = GroupedTensorStorage.of(members, stack, tensor.dtype)
    layout = GroupLayout.of(group._members, varies)
    vars(group).update(
        varying_extents(layout, x.device), _layout=layout, first_dims=firsts, last_dims=lasts
    )
    if tensor_offsets is not None:
        group.tensor_offsets = tensor_offsets
    return GroupedTensor.from_storage(group)
