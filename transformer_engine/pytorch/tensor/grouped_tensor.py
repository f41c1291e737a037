"""GroupedTensor: the matrices of n groups in one buffer, a tensor [n, M, N] if their shapes are equal.

The buffer holds plain values, or codes in one format. Each matrix then has its own quantizer's codes and scales.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...common.numbers import to_int
from ..runtime.autograd import Function
from ..runtime.checks import extents, tensor, values_dtype
from ..runtime.device import canonical_device
from ..runtime.double_backward import once_differentiable
from .quantized_tensor import QuantizedTensor
from .quantizer import Quantizer
from .storage.grouped_tensor_storage import GroupedTensorStorage
from .storage.quantized_tensor_storage import QuantizedTensorStorage

__all__ = ["GroupedTensor", "GroupedTensorStorage"]

Shapes = Sequence[Sequence[int]]


class GroupedTensor(QuantizedTensor, GroupedTensorStorage):  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
    """The matrices as a tensor: [n, M, N] for equal shapes, otherwise their logical shape. Results are plain tensors.

    Args:
        requires_grad: As for `torch.Tensor`.
        stride: Nominal strides; contiguous by default.
        buffers: Other `GroupedTensorStorage` arguments, by name.
    """

    STORAGE = GroupedTensorStorage
    amax = GroupedTensorStorage.amax  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __new__(
        cls,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_tensors: int,
        requires_grad: bool = False,
        stride: Sequence[int] | None = None,
        **buffers: Any,
    ) -> GroupedTensor:
        """Wrap buffers that were allocated elsewhere.

        Args:
            requires_grad: As for `torch.Tensor`.
            stride: Nominal strides; contiguous by default.

        The other arguments are as in `GroupedTensorStorage`.
        """
        storage = GroupedTensorStorage(shape, dtype, num_tensors=num_tensors, **buffers)
        return cls.from_storage(storage, requires_grad=requires_grad, stride=stride)

    @classmethod
    def of_members(
        cls, members: Sequence[Tensor], group_extents: Mapping[str, Any] | None = None
    ) -> GroupedTensor:
        """Copy these matrices into a group, all plain or all in one format; codes are copied unchanged.

        Args:
            members: The matrices.
            group_extents: `GroupedTensorStorage.extents` of the group; by default they follow from the matrices.
        """
        shapes = [tuple(member.shape) for member in members]
        quantizers = [m.writer() for m in members if isinstance(m, QuantizedTensor)]
        if not members or len(quantizers) not in (0, len(members)):
            raise ValueError(
                f"{len(quantizers)} of {len(members)} matrices are quantized; give at least one, and all alike"
            )
        equal = len(set(shapes)) == 1 and not (group_extents and any(group_extents["varies"]))
        quantizer = StackQuantizer(quantizers or None, None if equal else shapes)  # pyright: ignore[reportArgumentType]
        with torch.no_grad():
            storage = GroupedTensorStorage.of(
                [m.as_storage() if isinstance(m, QuantizedTensor) else m.detach() for m in members],
                quantizer,
                members[0].dtype,
            )
        if group_extents is not None:
            storage.restore_extents(group_extents)
        return cls.from_storage(storage)

    @classmethod
    def make_grouped_tensor_with_shapes(  # pyright: ignore[reportIncompatibleVariableOverride]
        cls,
        num_tensors: int,
        shapes: Shapes,
        quantizer: Quantizer | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> GroupedTensor:
        """Return uninitialized matrices with these shapes, each in the format of the quantizer."""
        num_tensors = to_int("num_tensors", num_tensors, 1)
        if len(shapes) != num_tensors or not shapes:
            raise ValueError(
                f"{len(shapes)} shapes for num_tensors={num_tensors}; give one per tensor"
            )
        return cls._uninitialized(
            [extents("shapes", shape) for shape in shapes], quantizer, device, dtype, None
        )

    @classmethod
    def _uninitialized(
        cls,
        shapes: Shapes,
        quantizer: Quantizer | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        varies: tuple[bool, bool] | None,
    ) -> GroupedTensor:
        """Allocate matrices; `varies` is as in `GroupLayout.of`."""
        dtype = torch.get_default_dtype() if dtype is None else dtype
        values_dtype("dtype", dtype)
        stack = stack_quantizer(quantizer, shapes, None if varies is None else False)
        storage = stack.empty((len(shapes), *shapes[0]), dtype, canonical_device(device), False)
        if varies is not None:
            storage.count_as_varying(varies)
        return cls.from_storage(storage)

    @classmethod
    def make_grouped_tensor(  # pyright: ignore[reportIncompatibleVariableOverride]
        cls,
        num_tensors: int,
        first_dims: Tensor | None,
        last_dims: Tensor | None,
        logical_first_dim: int,
        logical_last_dim: int,
        quantizer: Quantizer | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> GroupedTensor:
        """Return uninitialized matrices; sizes are read from the device, and None means equal sizes."""
        num_tensors = to_int("num_tensors", num_tensors, 1)
        firsts = _accept_extents(
            "first_dims", first_dims, num_tensors, logical_first_dim, last_dims is None
        )
        lasts = _accept_extents("last_dims", last_dims, num_tensors, logical_last_dim, False)
        shapes = list(zip(firsts, lasts, strict=True))
        varies = (first_dims is not None, last_dims is not None)
        return cls._uninitialized(shapes, quantizer, device, dtype, varies if any(varies) else None)

    @classmethod
    def make_grouped_tensor_from_rowwise_data(  # pyright: ignore[reportIncompatibleVariableOverride]
        cls,
        *,
        num_tensors: int,
        tensor_shape: Sequence[int],
        rowwise_data: Tensor,
        dtype: torch.dtype | None = None,
        internal: bool = False,
    ) -> GroupedTensor | GroupedTensorStorage:
        """Return num_tensors equally shaped matrices in a buffer; with `internal`, as a storage instead of a tensor."""
        num_tensors = to_int("num_tensors", num_tensors, 1)
        tensor("rowwise_data", rowwise_data)
        if dtype is not None and dtype != rowwise_data.dtype:
            raise ValueError(
                f"dtype={dtype} is not that of rowwise_data, {rowwise_data.dtype}; convert the buffer"
            )
        shapes = [extents("tensor_shape", tensor_shape)] * num_tensors
        storage = GroupedTensorStorage.around(shapes, rowwise_data.detach(), StackQuantizer(None))
        return (
            storage
            if internal
            else cls.from_storage(storage, requires_grad=rowwise_data.requires_grad)
        )

    @classmethod
    def from_stack(cls, stack: Tensor) -> GroupedTensor:
        """Return a group of plain matrices (or vectors) that shares the memory of a contiguous stack [n, ..]."""
        shapes = [tuple(stack.shape[1:])] * stack.shape[0]
        return cls.from_storage(
            GroupedTensorStorage.around(shapes, stack.detach(), StackQuantizer(None))
        )

    def _set_data(self, value: Tensor) -> None:
        """Adopt the memory of plain values with the same shape and dtype; otherwise as `QuantizedTensor.data`."""
        fits = (value.shape, value.dtype) == (self.shape, self.dtype) and value.is_contiguous()
        if self.holds_values and fits and not isinstance(value, QuantizedTensor):
            value = GroupedTensor.from_stack(value)
        super()._set_data(value)

    data = property(QuantizedTensor._get_data, _set_data)

    @property
    def holds_values(self) -> bool:
        """Whether the matrices are plain values instead of codes."""
        quantizer: Any = self._quantizer
        return quantizer is None or quantizer.quantizers is None

    def fsdp_pre_all_gather(self, *_: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise NotImplementedError(
            "a quantized parameter of all groups is not sharded as codes; use single_grouped_weight=False, one "
            "parameter a group, under fully_shard"
        )

    def _rebuilding(self) -> tuple[Any, tuple[Any, ...]]:
        return _make_grouped_tensor_in_reduce_ex, (
            self.split_into_quantized_tensors(),
            self.extents(),
        )


class _GroupValues(Function):
    """Plain matrices of a group as a plain tensor; the gradient passes through."""

    @staticmethod
    def forward(ctx: Any, group: GroupedTensor) -> Tensor:
        ctx.set_materialize_grads(False)  # a gradient may be delayed, or be in main_grad
        return _shared(group)

    @staticmethod
    @once_differentiable("GroupedLinear")
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        return grads[0]


def _shared(group: GroupedTensor) -> Tensor:
    memory = group.plain_memory()
    assert memory is not None
    return memory


# (buffer, view) for groups that optimizers step: they compare tensors by identity from step to step.
_views: WeakIdKeyDictionary = WeakIdKeyDictionary()


def group_memory(tensor: Any) -> Any:
    """The memory of a plain group as a tensor without gradient, the same in each call; or the tensor."""
    if not isinstance(tensor, GroupedTensor) or not tensor.holds_values:
        return tensor
    cached: Any = _views.get(tensor)
    if cached is None or cached[0] is not tensor.rowwise_data:
        cached = _views[tensor] = (tensor.rowwise_data, _shared(tensor))
    return cached[1]


def plain_stack(parameter: Any) -> Any:
    """Plain matrices of a group as a plain tensor on the same memory; any other tensor unchanged."""
    if not isinstance(parameter, GroupedTensor) or not parameter.holds_values:
        return parameter
    if torch.is_grad_enabled() and parameter.requires_grad:
        return _GroupValues.apply(parameter)
    return _shared(parameter)


class StackQuantizer(Quantizer):
    """codes_i = quantizer_i(x_i) for the matrices x_i of a group, in one buffer.

    Args:
        quantizers: One per matrix; None: plain values.
        shapes: Matrix shapes; None: from a stack [n, M, N].
    """

    TENSOR = GroupedTensor

    def __init__(self, quantizers: Sequence[Quantizer] | None, shapes: Shapes | None = None):
        usages = (
            quantizers[0].get_usages() if quantizers else {"rowwise": True, "columnwise": False}
        )
        super().__init__(**usages)
        self.quantizers = None if quantizers is None else tuple(quantizers)
        self.shapes = None if shapes is None else tuple(tuple(shape) for shape in shapes)
        self.stateful = any(quantizer.stateful for quantizer in quantizers or ())

    def _shapes(self, shape: Sequence[int]) -> Shapes:
        return [tuple(shape[1:])] * shape[0] if self.shapes is None else self.shapes

    def encode(
        self, tensor: Tensor, rowwise: bool, columnwise: bool, *, noop_flag: Tensor | None = None
    ) -> GroupedTensorStorage:
        if isinstance(tensor, QuantizedTensorStorage):
            tensor = tensor.decode(tensor.dtype)
        shapes = self._shapes(tensor.shape)
        pieces = tensor.reshape(-1).split([prod(shape) for shape in shapes])
        members: list[Any] = [
            piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)
        ]
        if self.quantizers is not None:
            members = [
                quantizer.encode(member, rowwise, columnwise, noop_flag=noop_flag)
                for quantizer, member in zip(self.quantizers, members, strict=True)
            ]
        return GroupedTensorStorage.of(members, self, tensor.dtype)

    def empty(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str | None,
        pin_memory: bool,
    ) -> GroupedTensorStorage:
        shapes = self._shapes(shape)
        if self.quantizers is None:
            data = torch.empty(
                sum(map(prod, shapes)), dtype=dtype, device=device, pin_memory=pin_memory
            )
            return GroupedTensorStorage.around(shapes, data, self)
        members = []
        for quantizer, member_shape in zip(self.quantizers, shapes, strict=True):
            quantizer = quantizer.copy()
            quantizer.set_usage(rowwise=self.rowwise_usage, columnwise=self.columnwise_usage)
            members.append(quantizer.empty(member_shape, dtype, device, False))
        group = GroupedTensorStorage.of(members, self, dtype)
        return group.mapped(Tensor.pin_memory) if pin_memory else group  # pyright: ignore[reportReturnType]

    def calibrate(self, tensor: Tensor) -> None:
        for quantizer, member in zip(self.quantizers or (), tensor.unbind(0), strict=False):
            quantizer.calibrate(member)

    def unsupported_shape_reason(
        self, shape: Sequence[int], rowwise: bool, columnwise: bool
    ) -> str | None:
        for quantizer, member_shape in zip(
            self.quantizers or (), self._shapes(shape), strict=False
        ):
            reason = quantizer.unsupported_shape_reason(member_shape, rowwise, columnwise)
            if reason is not None:
                return reason
        return None

    def copy(self) -> StackQuantizer:
        """Return a copy with independent usages, also in its members' quantizers."""
        twin = copy.copy(self)
        twin.quantizers = (
            None if self.quantizers is None else tuple(q.copy() for q in self.quantizers)
        )
        return twin

    def _configuration(self) -> Hashable:
        return self.quantizers, self.shapes


def stack_quantizer(
    quantizer: Quantizer | None, shapes: Shapes, stacked: bool | None = None
) -> StackQuantizer:
    """Quantizer for a group whose matrices all use (a copy of) one quantizer; None: plain values.

    Args:
        quantizer: The quantizer for every matrix.
        shapes: Their shapes.
        stacked: Whether the group is presented as a stack [n, M, N]; by default if all shapes are equal.
    """
    quantizers = None if quantizer is None else [quantizer.copy() for _ in shapes]
    checked_shapes = [tuple(shape) for shape in shapes]
    return StackQuantizer(
        quantizers,
        None if len(set(checked_shapes)) == 1 and stacked is not False else checked_shapes,
    )


def _accept_extents(
    name: str, extents: Tensor | None, count: int, logical: int, is_sum: bool
) -> list[int]:
    """Return one size per matrix; if none are given, `logical` or an equal share."""
    if extents is None:
        if is_sum and logical % max(count, 1):
            raise ValueError(
                f"num_tensors={count} does not divide the logical extent {logical}; give {name}"
            )
        return [logical // count if is_sum else logical] * count
    tensor(name, extents)
    if extents.dim() != 1 or extents.numel() != count or extents.is_floating_point():
        raise ValueError(
            f"{name} is {extents.dtype} {list(extents.shape)} for num_tensors={count}; give one whole number a tensor"
        )
    return extents.tolist()


def _make_grouped_tensor_in_reduce_ex(
    members: Sequence[Tensor], group_extents: Mapping[str, Any] | None = None
) -> GroupedTensor:
    """Return a GroupedTensor from its pickle; pickles from earlier releases have no extents."""
    return GroupedTensor.of_members(members, group_extents)


for _name in ("", "_with_shapes", "_from_rowwise_data"):
    setattr(
        GroupedTensorStorage,
        f"make_grouped_tensor{_name}",
        getattr(GroupedTensor, f"make_grouped_tensor{_name}"),
    )
GroupedTensorStorage.stack_quantizer = staticmethod(stack_quantizer)
PICKLED = (_make_grouped_tensor_in_reduce_ex,)
