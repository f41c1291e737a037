"""Quantization of matrix groups into one buffer, under the extension's names."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common.checks import described
from transformer_engine.common.numbers import to_ints, with_article
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.primitives.grouped_gemm import make_groups
from transformer_engine.pytorch.primitives.grouped_quantize import row_sums
from transformer_engine.pytorch.tensor.float8_tensor import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
)
from transformer_engine.pytorch.tensor.grouped_rows import (
    quantize_blocks_of_stack,
    quantize_rows,
    quantize_stack,
)
from transformer_engine.pytorch.tensor.grouped_tensor import (
    GroupedTensor,
    StackQuantizer,
    stack_quantizer,
)
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensorStorage
from transformer_engine.pytorch.tensor.quantizer import Quantizer
from transformer_engine.pytorch.tensor.storage.grouped_tensor_storage import GroupedTensorStorage

from .cast import torch_dtype
from .checks import quantizer_or_none, values, with_axes

__all__ = [
    "bgrad_group_quantize",
    "group_dequantize",
    "group_quantize",
]

Extents = Tensor | Sequence[int] | None


def group_quantize(
    tensor: Tensor,
    quantizer: Any,
    num_tensors: int,
    first_dims: Extents,
    last_dims: Extents = None,
    tensor_offsets: Tensor | None = None,
    noop_flag: Tensor | None = None,
    output: GroupedTensor | None = None,
) -> GroupedTensor:
    """Quantize the matrices in a group, stored one after the other in a tensor.

    The host does not wait for a GPU, and a CUDA graph can capture the call, unless `last_dims` is given or the format
    is NVFP4 in blocks of 16 x 16, with a scale per row, or with a reduction.

    Args:
        tensor: Values [total rows, K], or consecutive matrices with other shapes. Elements behind the last matrix
            are ignored.
        quantizer: Quantizer for every matrix; each gets its own scales.
        num_tensors: Number of matrices.
        first_dims: Rows per matrix, integers [num_tensors]; None if they are equal. MXFP8 and NVFP4 groups have
            multiples of 32 and 16 rows.
        last_dims: Columns per matrix; None if they are equal.
        tensor_offsets: First element per matrix and the end, int64 [num_tensors + 1]; computed if missing.
        noop_flag: float32 [1]; if it is not 0, `output` is unchanged.
        output: Group with equal matrices in the same shapes and format, which receives the codes.

    Returns:
        The group, or `output`. If `first_dims` is passed, they and `tensor_offsets` are on the group's device.

    Raises:
        ValueError: The extents do not fit the tensor, `noop_flag` is given without `output`, or a graph is being
            captured and the shapes must be read from the GPU.
    """
    quantizer_or_none(quantizer)
    values(tensor=tensor)
    with_axes("tensor", tensor, 1)
    if noop_flag is not None and output is None:
        raise ValueError(
            "noop_flag keeps the contents of output, which is None; give output, or leave noop_flag out"
        )
    x = tensor.detach().reshape(prod(tensor.shape[:-1]), tensor.shape[-1])
    if output is not None:
        return _quantize_group_into(
            output, x, quantizer, num_tensors, first_dims, last_dims, noop_flag
        )
    columns = x.shape[1]
    firsts, lasts = _extents_tensor(x.device, num_tensors, first_dims, last_dims)
    if firsts is not None and lasts is None and _stays_on_device(quantizer):
        if not firsts.is_cuda:
            _check_elements([(extent, columns) for extent in firsts.tolist()], num_tensors, x)
        return quantize_rows(x, quantizer, firsts, tensor_offsets)
    shapes = _shapes(x, num_tensors, firsts, lasts)
    flat = x.reshape(-1)[: sum(map(prod, shapes))]
    if firsts is None and lasts is None:
        stacked = flat.view(num_tensors, *shapes[0])
        if _stays_on_device(quantizer):
            one_scale = isinstance(quantizer, Float8Quantizer | Float8CurrentScalingQuantizer)
            return (quantize_stack if one_scale else quantize_blocks_of_stack)(stacked, quantizer)
        stack = stack_quantizer(quantizer, shapes)
        return stack.wrap(
            stack.encode(stacked, quantizer.rowwise_usage, quantizer.columnwise_usage)
        )
    stack = stack_quantizer(quantizer, shapes, stacked=False)
    group = stack.encode(flat, quantizer.rowwise_usage, quantizer.columnwise_usage)
    group.count_as_varying((firsts is not None, lasts is not None))
    group.first_dims, group.last_dims = firsts, lasts
    if tensor_offsets is not None:
        group.tensor_offsets = tensor_offsets
    return GroupedTensor.from_storage(group)


def member_shapes(
    x: Tensor, num_tensors: int, first_dims: Extents, last_dims: Extents
) -> tuple[list[tuple[int, int]], Tensor | None, Tensor | None]:
    """Per-matrix shapes for a group in x [R, K], and `first_dims` and `last_dims` as int64 on its device."""
    firsts, lasts = _extents_tensor(x.device, num_tensors, first_dims, last_dims)
    return _shapes(x, num_tensors, firsts, lasts), firsts, lasts


def _extents_tensor(
    device: torch.device, count: int, first_dims: Extents, last_dims: Extents
) -> tuple[Tensor | None, ...]:
    pairs = (("first_dims", first_dims), ("last_dims", last_dims))
    return tuple(
        [None if dims is None else _extents(name, dims, count, device) for name, dims in pairs]
    )


def _stays_on_device(quantizer: Any) -> bool:
    """Whether groups are quantized without row counts on the host."""
    return isinstance(quantizer, Quantizer) and quantizer.groups_unsupported_reason() is None


def _extents(name: str, dims: Tensor | Sequence[int], count: int, device: torch.device) -> Tensor:
    """Extents as int64 [count] on a device; a tensor that fits is returned unchanged."""
    held = (
        dims
        if isinstance(dims, Tensor)
        else torch.tensor(to_ints(name, dims), dtype=torch.int64, device=device)
    )
    if held.dim() != 1 or held.shape[0] != count or held.is_floating_point():
        raise ValueError(
            f"{name} is {held.dtype} {list(held.shape)} for num_tensors={count}; give one integer per matrix"
        )
    return held.to(device=device, dtype=torch.int64)


def _shapes(
    x: Tensor, num_tensors: int, first_dims: Tensor | None, last_dims: Tensor | None
) -> list[tuple[int, int]]:
    """Per-matrix shapes for a group; the host reads numbers on a GPU."""
    reads = x.is_cuda and (first_dims is not None or last_dims is not None)
    if reads and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "first_dims or last_dims of this format must be read from the GPU, which graph capture does not allow; "
            "call group_quantize before the capture, or leave them None for equal matrices"
        )
    rows, columns = x.shape
    lasts = [columns] * num_tensors if last_dims is None else last_dims.tolist()
    if first_dims is not None:
        firsts = first_dims.tolist()
    else:
        firsts = [rows // num_tensors if last_dims is None else rows] * num_tensors
    shapes = list(zip(firsts, lasts, strict=True))
    _check_elements(shapes, num_tensors, x)
    return shapes


def _check_elements(shapes: list[tuple[int, int]], num_tensors: int, x: Tensor) -> None:
    if sum(map(prod, shapes)) > x.numel() or min(map(min, shapes), default=-1) < 0:
        raise ValueError(
            f"{len(shapes)} matrices {shapes} for num_tensors={num_tensors} and a tensor {list(x.shape)}; give "
            "one extent for each matrix, of at most as many elements in all"
        )


def _quantize_group_into(
    output: GroupedTensor,
    x: Tensor,
    quantizer: Any,
    num_tensors: int,
    first_dims: Extents,
    last_dims: Extents,
    noop_flag: Tensor | None,
) -> GroupedTensor:
    """Quantize equal matrices into an existing group's buffers."""
    if first_dims is not None or last_dims is not None or not output.all_same_shape():
        raise ValueError(
            "output receives matrices of equal shapes only; leave first_dims and last_dims None, or output"
        )
    if output.num_tensors != num_tensors or prod(output.logical_shape) != x.numel():
        raise ValueError(
            f"output has {output.num_tensors} matrices of logical shape {list(output.logical_shape)}, but the tensor "
            f"is {list(x.shape)} for num_tensors={num_tensors}; give a group of the same shapes"
        )
    stack = x.reshape(num_tensors, *output.tensor_shapes[0])
    # unless the flag is set
    records = isinstance(quantizer, Float8Quantizer) and noop_flag is not None
    if (
        output.scale is not None
        and output.amax is not None
        and _stays_on_device(quantizer)
        and not records
    ):
        output.copy_from_storage(quantize_stack(stack, quantizer), noop_flag=noop_flag)
        return output
    for member, values_ in zip(output.members(), stack.unbind(0), strict=True):
        member.quantize_(values_, noop_flag=noop_flag)
    return output


def group_dequantize(
    input: GroupedTensorStorage, otype: DType | int | torch.dtype
) -> GroupedTensor:
    """Dequantize a group to a group with plain matrices in a dtype.

    Args:
        input: Group with quantized or plain matrices.
        otype: Value dtype.
    """
    if not isinstance(input, GroupedTensorStorage):
        raise TypeError(
            f"input={described(input)} is {with_article(type(input))}; give a GroupedTensor"
        )
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
    tensor: Tensor,
    quantizer: Any,
    num_tensors: int,
    first_dims: Extents,
    last_dims: Extents = None,
    tensor_offsets: Tensor | None = None,
) -> list[Any]:
    """Sum every matrix over its rows and quantize: `[sums [num_tensors, K], group]`; see `group_quantize`.

    The sums are float32, rounded to the tensor's dtype.

    Args:
        tensor: Values [sum of the rows, K].
        quantizer: Quantizer of every matrix; each gets its own scales.
        num_tensors: Number of matrices.
        first_dims: Rows of each matrix, integers [num_tensors]; None if they are equal.
        last_dims: Must be None: bias gradients of matrices with different columns have different lengths.
        tensor_offsets: See `group_quantize`.

    Raises:
        ValueError: `last_dims` is given.
    """
    if last_dims is not None:
        raise ValueError(
            "bgrad_group_quantize with last_dims would return sums of different lengths; leave it None"
        )
    group = group_quantize(tensor, quantizer, num_tensors, first_dims, None, tensor_offsets)
    x = tensor.detach().reshape(prod(tensor.shape[:-1]), tensor.shape[-1])
    if group.first_dims is None:
        splits: Any = (x.shape[0] // num_tensors,) * num_tensors
        x = x[: sum(splits)]
    else:
        splits = group.first_dims if x.is_cuda else tuple(group.first_dims.tolist())
        x = x if x.is_cuda else x[: sum(splits)]
    sums = row_sums(x.contiguous(), make_groups(splits, x.shape[0], x.device))
    return [sums.to(tensor.dtype), group]
