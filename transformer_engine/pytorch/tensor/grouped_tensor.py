"""GroupedTensor: the matrices of n groups in one buffer, a tensor [n, M, N] where their shapes are equal.

Values are plain: a quantized group is a tensor of its own format.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...common.checks import whole
from ..runtime.checks import tensor, values_dtype
from ..runtime.device import canonical_device
from .quantizer import Quantizer

__all__ = ["GroupedTensor", "GroupedTensorStorage"]


class GroupedTensorStorage:
    """n matrices [M_i, N_i], one behind the other in a flat buffer.

    rowwise_data     the buffer, flat
    tensor_shapes    of each matrix
    offsets          where each begins in the buffer
    logical_shape    (n M, N) of equal shapes; (sum M_i, N), (M, sum N_i) where one extent is common; else (1, total)
    columnwise_data, scale_inv, quantizer   None: the values are plain
    """

    def __init__(self, shapes: Sequence[Sequence[int]], data: Tensor, quantizer: Quantizer | None = None):
        if quantizer is not None:
            raise NotImplementedError(
                f"groups are not quantized by a {type(quantizer).__name__} into one buffer; quantize their tensors one "
                "by one"
            )
        self.tensor_shapes = [torch.Size(shape) for shape in shapes]
        total = sum(prod(shape) for shape in self.tensor_shapes)
        if not self.tensor_shapes or data.numel() != total:
            raise ValueError(
                f"{len(self.tensor_shapes)} tensors of {total} elements do not fill a buffer of {data.numel()}; give "
                "one shape a tensor and a buffer of all elements"
            )
        self.rowwise_data = data.reshape(-1)
        self.offsets = make_tensor_offsets([prod(shape) for shape in self.tensor_shapes], 1)[:-1]
        self.quantizer: Quantizer | None = None
        self.columnwise_data: Tensor | None = None
        self.scale_inv: Tensor | None = None
        self.columnwise_scale_inv: Tensor | None = None
        self.quantized_tensors: list[Tensor] | None = None

    @property
    def num_tensors(self) -> int:
        return len(self.tensor_shapes)

    @property
    def fake_dtype(self) -> torch.dtype:
        return self.rowwise_data.dtype

    @property
    def logical_shape(self) -> torch.Size:
        firsts, lasts = self._extents(0), self._extents(-1)
        if self.all_same_last_dim():
            return torch.Size((sum(firsts), lasts[0]))
        if self.all_same_first_dim():
            return torch.Size((firsts[0], sum(lasts)))
        return torch.Size((1, self.rowwise_data.numel()))

    def has_data(self) -> bool:
        return True

    def has_columnwise_data(self) -> bool:
        return False

    def all_same_first_dim(self) -> bool:
        return len(set(self._extents(0))) == 1

    def all_same_last_dim(self) -> bool:
        return len(set(self._extents(-1))) == 1

    def all_same_shape(self) -> bool:
        return len(set(self.tensor_shapes)) == 1

    def varying_both_dims(self) -> bool:
        return not (self.all_same_first_dim() or self.all_same_last_dim())

    def get_common_first_dim(self) -> int:
        """The first extent of every matrix; RuntimeError where they differ."""
        return self._common(0, "first")

    def get_common_last_dim(self) -> int:
        """The last extent of every matrix; RuntimeError where they differ."""
        return self._common(-1, "last")

    def get_dtype(self) -> torch.dtype:
        return self.fake_dtype

    def split_into_quantized_tensors(self) -> list[Tensor]:
        """The matrices, as views of the buffer; the same objects at every call."""
        if self.quantized_tensors is None:
            flat = self.rowwise_data.detach()
            self.quantized_tensors = [
                flat[begin : begin + prod(shape)].view(shape)
                for begin, shape in zip(self.offsets, self.tensor_shapes, strict=True)
            ]
        return self.quantized_tensors

    def quantize(self, tensors: Sequence[Tensor], noop_flag: Tensor | None = None) -> list[Tensor]:
        """Copy values into the matrices, unless the flag on the device is set; nothing is changed where one misfits."""
        if [value.shape for value in tensors] != self.tensor_shapes:
            raise ValueError(
                f"tensors are {[list(value.shape) for value in tensors]}; give {[list(s) for s in self.tensor_shapes]}"
            )
        held = self.split_into_quantized_tensors()
        for into, value in zip(held, tensors, strict=True):
            into.copy_(
                value if noop_flag is None else torch.where(noop_flag != 0, into, value.to(into.dtype))
            )
        return held

    def _extents(self, axis: int) -> list[int]:
        return [shape[axis] for shape in self.tensor_shapes]

    def _common(self, axis: int, name: str) -> int:
        extents = self._extents(axis)
        if len(set(extents)) > 1:
            raise RuntimeError(f"the {name} extents {extents} differ; ask all_same_{name}_dim() before")
        return extents[0]

    @staticmethod
    def make_tensor_offsets(split_dims: Sequence[int], common_dim: int) -> list[int]:
        """[0, cumulative split * common]: where each matrix begins, and the end."""
        return make_tensor_offsets(split_dims, common_dim)

    @classmethod
    def make_grouped_tensor_with_shapes(
        cls,
        num_tensors: int,
        shapes: Sequence[Sequence[int]],
        quantizer: Quantizer | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> GroupedTensor:
        """Uninitialised matrices of these shapes."""
        whole("num_tensors", num_tensors)
        if len(shapes) != num_tensors:
            raise ValueError(f"{len(shapes)} shapes for num_tensors={num_tensors}; give one a tensor")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        values_dtype("dtype", dtype)
        values = torch.empty(
            sum(prod(shape) for shape in shapes), dtype=dtype, device=canonical_device(device)
        )
        return GroupedTensor.of(shapes, values, quantizer)

    @classmethod
    def make_grouped_tensor_from_rowwise_data(
        cls,
        *,
        num_tensors: int,
        tensor_shape: Sequence[int],
        rowwise_data: Tensor,
        dtype: torch.dtype | None = None,
        internal: bool = False,
    ) -> GroupedTensor | GroupedTensorStorage:
        """num_tensors matrices of one shape around a buffer; internal: without a tensor around them."""
        whole("num_tensors", num_tensors)
        tensor("rowwise_data", rowwise_data)
        if dtype is not None and dtype != rowwise_data.dtype:
            raise ValueError(
                f"dtype={dtype} is not that of rowwise_data, {rowwise_data.dtype}; convert the buffer"
            )
        shapes = [tensor_shape] * num_tensors
        if internal:
            return GroupedTensorStorage(shapes, rowwise_data)
        return GroupedTensor.of(shapes, rowwise_data)


class GroupedTensor(torch.Tensor, GroupedTensorStorage):
    """The matrices as a tensor: [n, M, N] of equal shapes, else their logical shape. Operations give plain tensors."""

    def __new__(cls, *_: Any, **__: Any) -> GroupedTensor:
        raise TypeError(
            "a GroupedTensor is made by make_grouped_tensor_with_shapes or make_grouped_tensor_from_rowwise_data"
        )

    @classmethod
    def of(
        cls, shapes: Sequence[Sequence[int]], data: Tensor, quantizer: Quantizer | None = None
    ) -> GroupedTensor:
        """Matrices of these shapes around a buffer, which is shared."""
        storage = GroupedTensorStorage(shapes, data, quantizer)
        stacked = (storage.num_tensors, *storage.tensor_shapes[0])
        shape = stacked if storage.all_same_shape() else storage.logical_shape
        self = torch.Tensor._make_subclass(cls, storage.rowwise_data.detach().view(shape), data.requires_grad)
        vars(self).update(vars(storage))
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})


def make_tensor_offsets(split_dims: Sequence[int], common_dim: int) -> list[int]:
    """[0, cumulative split * common]"""
    offsets = [0]
    for split in split_dims:
        offsets.append(offsets[-1] + split * common_dim)
    return offsets
