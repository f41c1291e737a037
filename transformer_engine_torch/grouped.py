"""Groups of matrices under the extension's names: quantization into one buffer, offsets, and shared allocations."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common.checks import described
from transformer_engine.common.formats import round_up
from transformer_engine.common.numbers import to_ints, with_article
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.runtime.device import canonical_device
from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor, StackQuantizer, stack_quantizer
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensorStorage
from transformer_engine.pytorch.tensor.storage.block_scaled import BlockScaledStorage
from transformer_engine.pytorch.tensor.storage.grouped_tensor_storage import GroupedTensorStorage

from .cast import torch_dtype
from .checks import quantizer_or_none, sequence, values, with_axes

Extents = Tensor | Sequence[int] | None


def _shapes(
    tensor: Tensor, num_tensors: int, first_dims: Extents, last_dims: Extents
) -> list[tuple[int, int]]:
    """Return the shape of each matrix of a group; numbers on a GPU are read by the host."""
    rows, columns = tensor.numel() // tensor.shape[-1], tensor.shape[-1]
    if last_dims is not None:
        lasts = to_ints("last_dims", last_dims)
        firsts = [rows] * num_tensors if first_dims is None else to_ints("first_dims", first_dims)
    else:
        lasts = [columns] * num_tensors
        even = [rows // num_tensors] * num_tensors
        firsts = even if first_dims is None else to_ints("first_dims", first_dims)
    shapes = list(zip(firsts, lasts, strict=True))
    if len(shapes) != num_tensors or sum(map(prod, shapes)) > tensor.numel():
        raise ValueError(
            f"{len(shapes)} matrices {shapes} for num_tensors={num_tensors} and a tensor {list(tensor.shape)}; give "
            "one extent for each matrix, of at most as many elements in all"
        )
    return shapes


def group_quantize(
    tensor: Tensor,
    quantizer: Any,
    num_tensors: int,
    first_dims: Extents = None,
    last_dims: Extents = None,
    offsets: Tensor | None = None,
    noop: Tensor | None = None,
    output: GroupedTensor | None = None,
) -> GroupedTensor:
    """Quantize the matrices of a group, one after the other in a tensor.

    Args:
        tensor: Values [sum of the rows, K], or of matrices of other shapes in a row. Elements behind the last matrix
            are ignored.
        quantizer: Quantizer of every matrix; each gets its own scales.
        num_tensors: Number of matrices.
        first_dims: Rows of each matrix, integers [num_tensors]; None if they are equal. On a GPU they are read by the
            host.
        last_dims: Columns of each matrix; None if they are equal.
        offsets: Has no effect: the offsets follow from the extents.
        noop: float32 [1]; if it is not 0, `output` is unchanged.
        output: Group of the same shapes and format that receives the codes.

    Returns:
        The group, or `output`.

    Raises:
        ValueError: The extents do not fit the tensor, or `noop` is given without `output`.
    """
    quantizer_or_none(quantizer)
    values(tensor=tensor)
    with_axes("tensor", tensor, 1)
    shapes = _shapes(tensor, num_tensors, first_dims, last_dims)
    if noop is not None and output is None:
        raise ValueError("noop keeps the contents of output, which is None; give output, or leave noop out")
    flat = tensor.detach().reshape(-1)[: sum(map(prod, shapes))]
    if output is not None:
        pieces = [
            part.view(shape) for part, shape in zip(flat.split([*map(prod, shapes)]), shapes, strict=True)
        ]
        for member, piece in zip(output.members(), pieces, strict=True):
            member.quantize_(piece, noop_flag=noop)
        return output
    if len(set(shapes)) == 1:
        flat = flat.view(num_tensors, *shapes[0])
    stack = stack_quantizer(quantizer, shapes)
    return stack.wrap(stack.encode(flat, quantizer.rowwise_usage, quantizer.columnwise_usage))


def group_dequantize(input: GroupedTensorStorage, otype: DType | int | torch.dtype) -> GroupedTensor:
    """Return the values of a group as a group of plain matrices of a dtype.

    Args:
        input: Group of quantized or plain matrices.
        otype: Dtype of the values.
    """
    if not isinstance(input, GroupedTensorStorage):
        raise TypeError(f"input={described(input)} is {with_article(type(input))}; give a GroupedTensor")
    dtype = torch_dtype(otype)
    matrices = [
        m.dequantize(dtype=dtype) if isinstance(m, QuantizedTensorStorage) else m.to(dtype)
        for m in input.members()
    ]
    flat = torch.cat([matrix.reshape(-1) for matrix in matrices])
    shapes = input.tensor_shapes
    stack = StackQuantizer(None, None if input.all_same_shape() else shapes)
    return GroupedTensor.from_storage(GroupedTensorStorage.around(shapes, flat, stack))


def bgrad_group_quantize(
    tensor: Tensor, quantizer: Any, num_tensors: int, first_dims: Extents = None
) -> list[Any]:
    """Return `[sums over the rows of each matrix [num_tensors, K], the quantized group]`; see `group_quantize`.

    The sums are float32, rounded to the dtype of the tensor.

    Args:
        tensor: Values [sum of the rows, K].
        quantizer: Quantizer of every matrix; each gets its own scales.
        num_tensors: Number of matrices.
        first_dims: Rows of each matrix, integers [num_tensors]; None if they are equal.
    """
    made = group_quantize(tensor, quantizer, num_tensors, first_dims)
    rows = [shape[0] for shape in made.tensor_shapes]
    matrix = tensor.reshape(-1, tensor.shape[-1])[: sum(rows)]
    sums = [part.sum(0, dtype=torch.float32).to(tensor.dtype) for part in matrix.split(rows)]
    return [torch.stack(sums), made]


def splits_to_offsets(first_dims: Tensor, last_dim: int) -> Tensor:
    """Return the first element of each matrix [first_dims[i], last_dim] in their buffer, and the end: int64 [n + 1].

    Args:
        first_dims: Rows of each matrix, integers [n].
        last_dim: Columns of every matrix.
    """
    with_axes("first_dims", first_dims, 1)
    ends = (first_dims.to(torch.int64) * last_dim).cumsum(0)
    return torch.nn.functional.pad(ends, (1, 0))


def splits_to_offsets_multi(
    split_sizes: Tensor | Sequence[int],
    device: torch.device | str | None,
    strides: Sequence[int],
    include_leading_zero: Sequence[bool],
    dtypes: Sequence[torch.dtype],
    bulk: bool = True,
) -> list[Tensor]:
    """Return several tables of offsets for the same splits.

    Args:
        split_sizes: Rows of each group, integers [n].
        device: Device of the tables.
        strides: Elements of a row, one for each table.
        include_leading_zero: Whether each table begins with 0 (and has n + 1 numbers instead of n).
        dtypes: Integer dtype of each table.
        bulk: Allocate all tables in one buffer.
    """
    place = canonical_device(device)
    sizes = torch.as_tensor(split_sizes, dtype=torch.int64, device=place)
    tables = []
    for stride, leading, dtype in zip(strides, include_leading_zero, dtypes, strict=True):
        offsets = splits_to_offsets(sizes, stride)
        tables.append((offsets if leading else offsets[1:]).to(dtype))
    if not bulk:
        return tables
    held = bulk_allocate([table.shape for table in tables], dtypes, place, [16] * len(tables))
    return [target.copy_(table) for target, table in zip(held, tables, strict=True)]


def bulk_allocate(
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    device: torch.device | str | None = None,
    alignments: Sequence[int] | None = None,
) -> list[Tensor]:
    """Return uninitialized tensors in one allocation.

    Args:
        shapes: Shape of each tensor.
        dtypes: Dtype of each tensor.
        device: Device of the tensors.
        alignments: Bytes to a multiple of which each tensor begins; by default 256.
    """
    aligned = [256] * len(shapes) if alignments is None else alignments
    begins, end = [], 0
    for shape, dtype, alignment in zip(shapes, dtypes, aligned, strict=True):
        begin = round_up(end, max(alignment, dtype.itemsize))
        begins.append(begin)
        end = begin + prod(shape) * dtype.itemsize
    whole = torch.empty(end, dtype=torch.uint8, device=canonical_device(device))
    return [
        whole[begin : begin + prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
        for begin, shape, dtype in zip(begins, shapes, dtypes, strict=True)
    ]


def copy_data_ptrs_to_device(tensors: Sequence[Tensor], device: torch.device | str | None = None) -> Tensor:
    """Return the addresses of tensors as int64 [n] on a device.

    Args:
        tensors: n tensors, on any device.
        device: Device of the result; None is the current one.
    """
    sequence("tensors", tensors)
    addresses = [tensor.data_ptr() for tensor in tensors]
    return torch.tensor(addresses, dtype=torch.int64, device=canonical_device(device))


def nvfp4_data_transpose(input: Tensor, output: Tensor | None = None) -> Tensor:
    """Return FP4 codes uint8 [K, M / 2] of the transpose of a matrix with codes uint8 [M, K / 2].

    Args:
        input: Codes, two in a byte, the even column in the low nibble.
        output: Tensor that receives the result.

    Raises:
        ValueError: `input` is not such a matrix, or M is odd.
    """
    if input.dim() != 2 or input.dtype != torch.uint8 or input.shape[0] % 2:
        raise ValueError(f"input is {input.dtype} {list(input.shape)}; give uint8 [M, K / 2] with an even M")
    codes = torch.stack((input & 0xF, input >> 4), dim=-1).flatten(-2).t()
    packed = (codes[:, 0::2] | (codes[:, 1::2] << 4)).contiguous()
    return packed if output is None else output.copy_(packed)


def swizzle_scales_for_gemm_(tensor: Any) -> None:
    """Check that products can read the scales of a block-scaled tensor; there is nothing to reorder.

    Tensors keep scales row by row, and products of this package read them in this order, or reorder them for a library.

    Args:
        tensor: MXFP8 or NVFP4 tensor, FP8 tensor in blocks of 128, or a group of such tensors.

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


grouped_swizzle_for_gemm = swizzle_scales_for_gemm_


def multi_tensor_swizzle_scales_for_gemm_(tensors: Sequence[Any], *directions: bool) -> None:
    """Check that products can read the scales of several tensors; see `swizzle_scales_for_gemm_`.

    Args:
        tensors: Block-scaled tensors.
        directions: Have no effect: both directions are kept row by row.
    """
    sequence("tensors", tensors)
    for tensor in tensors:
        swizzle_scales_for_gemm_(tensor)


multi_tensor_swizzle_scales_for_gemm_unchecked_ = multi_tensor_swizzle_scales_for_gemm_
