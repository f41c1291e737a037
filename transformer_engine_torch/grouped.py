"""Matrix groups under the extension's names: offsets, shared allocations, and scale layouts."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common.checks import described
from transformer_engine.common.formats import round_up
from transformer_engine.common.numbers import to_ints, with_article
from transformer_engine.pytorch.runtime.device import canonical_device
from transformer_engine.pytorch.tensor.storage.block_scaled import BlockScaledStorage
from transformer_engine.pytorch.tensor.storage.grouped_layout import (
    make_tensor_offsets,
)
from transformer_engine.pytorch.tensor.storage.grouped_tensor_storage import GroupedTensorStorage

from .checks import sequence, with_axes

__all__ = [
    "bulk_allocate",
    "copy_data_ptrs_to_device",
    "grouped_swizzle_for_gemm",
    "multi_tensor_swizzle_scales_for_gemm_",
    "multi_tensor_swizzle_scales_for_gemm_unchecked_",
    "nvfp4_data_transpose",
    "splits_to_offsets",
    "splits_to_offsets_multi",
    "swizzle_scales_for_gemm_",
]


def splits_to_offsets(first_dims: Tensor, logical_last_dim: int) -> Tensor:
    """First buffer element for each matrix [first_dims[i], last_dim], and the end: int64 [n + 1].

    Args:
        first_dims: Rows per matrix, integers [n].
        logical_last_dim: Columns in every matrix.
    """
    with_axes("first_dims", first_dims, 1)
    return make_tensor_offsets(first_dims, logical_last_dim)


def splits_to_offsets_multi(
    split_sizes: Tensor | Sequence[int],
    device: torch.device | str | None,
    *,
    strides: Sequence[int],
    include_leading_zero: Sequence[bool],
    dtypes: Sequence[torch.dtype],
    bulk_allocate: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Compute several offset tables for the same splits.

    Args:
        split_sizes: Rows per group, integers [n], on any device.
        device: Result device.
        strides: Elements per row, one for each table.
        include_leading_zero: Whether each table begins with 0 (and has n + 1 numbers instead of n).
        dtypes: Integer dtype per table.
        bulk_allocate: Allocate all tables in one buffer, each at a multiple of 16 bytes.

    Returns:
        The splits, int64 [n] on the device, and the tables: table i is the inclusive running sum of splits times
        strides[i].

    Raises:
        ValueError: The lists differ in length, the splits are no vector of integers, or a dtype is not int32 or int64.
    """
    place = canonical_device(device)
    sizes = split_sizes
    if not isinstance(sizes, Tensor):
        sizes = torch.tensor(to_ints("split_sizes", sizes), dtype=torch.int64, device="cpu")
    if sizes.dim() != 1 or sizes.is_floating_point():
        raise ValueError(
            f"split_sizes is {sizes.dtype} {list(sizes.shape)}; give one integer per group, in one dimension"
        )
    if not len(strides) == len(include_leading_zero) == len(dtypes):
        raise ValueError(
            f"{len(strides)} strides, {len(include_leading_zero)} include_leading_zero and {len(dtypes)} dtypes; give "
            "one of each per table"
        )
    if not set(dtypes) <= {torch.int32, torch.int64}:
        raise ValueError(
            f"dtypes={list(dtypes)}; give torch.int32 or torch.int64 for each table of offsets"
        )
    sizes = sizes.to(device=place, dtype=torch.int64)
    tables = []
    for stride, leading, dtype in zip(strides, include_leading_zero, dtypes, strict=True):
        offsets = splits_to_offsets(sizes, stride)
        tables.append((offsets if leading else offsets[1:]).to(dtype))
    if bulk_allocate and tables:
        allocated = _bulk_allocate(
            [table.shape for table in tables], dtypes, place, [16] * len(tables)
        )
        tables = [target.copy_(table) for target, table in zip(allocated, tables, strict=True)]
    return sizes, tables


def bulk_allocate(
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    device: torch.device | str | None = None,
    alignments: Sequence[int] | None = None,
) -> list[Tensor]:
    """Return uninitialized tensors in one allocation.

    Args:
        shapes: Shape per tensor.
        dtypes: Dtype per tensor.
        device: Tensor device.
        alignments: Bytes to a multiple of which each tensor begins; by default 256.
    """
    aligned = [256] * len(shapes) if alignments is None else alignments
    begins, end = [], 0
    for shape, dtype, alignment in zip(shapes, dtypes, aligned, strict=True):
        begin = round_up(end, max(alignment, dtype.itemsize))
        begins.append(begin)
        end = begin + prod(shape) * dtype.itemsize
    buffer = torch.empty(end, dtype=torch.uint8, device=canonical_device(device))
    return [
        buffer[begin : begin + prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
        for begin, shape, dtype in zip(begins, shapes, dtypes, strict=True)
    ]


_bulk_allocate = bulk_allocate  # splits_to_offsets_multi has an argument with this name


def copy_data_ptrs_to_device(
    tensors: Sequence[Tensor], device: torch.device | str | None = None
) -> Tensor:
    """Tensor addresses as int64 [n] on a device.

    Args:
        tensors: n tensors, on any device.
        device: Result device; None is the current one.
    """
    sequence("tensors", tensors)
    addresses = [tensor.data_ptr() for tensor in tensors]
    return torch.tensor(addresses, dtype=torch.int64, device=canonical_device(device))


def nvfp4_data_transpose(input: Tensor, output: Tensor | None = None) -> Tensor:
    """Transpose a matrix with FP4 codes uint8 [M, K / 2] to codes uint8 [K, M / 2].

    Args:
        input: Codes, two in a byte, the even column in the low nibble.
        output: Tensor that receives the result.

    Raises:
        ValueError: `input` is not such a matrix, or M is odd.
    """
    if input.dim() != 2 or input.dtype != torch.uint8 or input.shape[0] % 2:
        raise ValueError(
            f"input is {input.dtype} {list(input.shape)}; give uint8 [M, K / 2] with an even M"
        )
    codes = torch.stack((input & 0xF, input >> 4), dim=-1).flatten(-2).t()
    packed = (codes[:, 0::2] | (codes[:, 1::2] << 4)).contiguous()
    return packed if output is None else output.copy_(packed)


def swizzle_scales_for_gemm_(tensor: Any) -> None:
    """Put a block-scaled tensor's scales in matrix-instruction order, in place.

    `_with_gemm_swizzled_scales` is True then. Products read both orders. Float32 scales for FP8 blocks stay.

    Args:
        tensor: MXFP8 or NVFP4 tensor, FP8 tensor in blocks of 128, or a group with such tensors.

    Raises:
        TypeError: The tensor has no block scales.
    """
    parts = tensor.members() if isinstance(tensor, GroupedTensorStorage) else [tensor]
    for part in parts:
        if not isinstance(part, BlockScaledStorage):
            raise TypeError(
                f"tensor={described(part)} is {with_article(type(part))} without block scales; give an MXFP8 or NVFP4 "
                "tensor"
            )
    tensor.swizzle_()


grouped_swizzle_for_gemm = swizzle_scales_for_gemm_


def multi_tensor_swizzle_scales_for_gemm_(tensors: Sequence[Any], *directions: bool) -> None:
    """Put several tensors' scales in matrix-instruction order; see `swizzle_scales_for_gemm_`.

    Args:
        tensors: Block-scaled tensors.
        directions: Have no effect: a tensor's directions have the same order.
    """
    sequence("tensors", tensors)
    for tensor in tensors:
        swizzle_scales_for_gemm_(tensor)


multi_tensor_swizzle_scales_for_gemm_unchecked_ = multi_tensor_swizzle_scales_for_gemm_
