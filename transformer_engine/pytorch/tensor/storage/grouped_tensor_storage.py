"""GroupedTensorStorage: n matrices [M_i, N_i] in one format, in flat code and scale buffers.

A member is a storage of buffer views (a tensor, if values are plain), so writing into a member
writes into the group. `grouped_layout` describes the positions in the buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from ....common.formats import TensorFormat
from ...primitives.operand import Operand
from ...primitives.quantize import Quantized
from .grouped_extents import GroupExtents
from .grouped_layout import (
    BUFFERS,
    COLUMNWISE,
    ONE_SCALE,
    ROWWISE,
    GroupLayout,
    GroupMember,
    Offsets,
    Place,
    check_variant,
    has_one_scale,
    make_tensor_offsets,
    member_shapes,
    member_tensors,
    place_members,
    rebuild_arguments,
    varying_extents,
)
from .quantized_tensor_storage import QuantizedTensorStorage, Writer

__all__ = ["GroupedTensorStorage"]


class GroupedTensorStorage(GroupExtents, QuantizedTensorStorage):  # pyright: ignore[reportIncompatibleVariableOverride]
    """Flat buffers that hold codes, scales and maxima of n matrices.

    Args:
        shape: [n, M, N] for equal matrices, or their logical shape [n M, N], [sum M_i, N] or [M, sum N_i].
        dtype: Nominal dtype; the dtype of `data` for plain values, float32 otherwise, unless given.
        num_tensors: n.
        shapes: Shape of each matrix; by default they follow from shape, first_dims and last_dims.
        quantizer: Quantizer for every matrix; None for plain values.
        data: Rowwise codes (or plain values), one matrix after the other.
        columnwise_data: Columnwise codes.
        scale_inv: Rowwise scales.
        columnwise_scale_inv: Columnwise scales.
        amax: Maxima from which a second scale level is computed, rowwise.
        columnwise_amax: The same, columnwise.
        scale: Kept for the caller; delayed-scaling scales belong to the quantizer.
        first_dims: Extents M_i, int64 [n]; None if all are equal.
        last_dims: Extents N_i, likewise.
        tensor_offsets: First element of each matrix in `data`, as a tensor [n + 1].
        offsets: The same as a host list.
        scale_inv_offsets: First rowwise scale of each matrix.
        columnwise_scale_inv_offsets: First columnwise scale of each matrix.
        requires_grad: Of a `GroupedTensor`; a storage has none.
        stride: Likewise.
        with_gemm_swizzled_scales: One-byte scales are in matrix-instruction order, matrix by matrix.
        row_scaled_nvfp4: Must equal the quantizer's setting, as the next two.
        nvfp4_use_4over6: See `row_scaled_nvfp4`.
        nvfp4_e4m3_max: See `row_scaled_nvfp4`.
        layout: Extents and positions, if this package created the group.
        rowwise_data: Alias for `data`.

    Raises:
        ValueError: The shapes contradict each other, or a buffer is missing or too short.
    """

    ROWWISE, COLUMNWISE = ROWWISE, COLUMNWISE
    TENSORS = {
        "rowwise_data": "rowwise_data",
        "columnwise_data": "columnwise_data",
        "scale_inv": "scale_inv",
        "columnwise_scale_inv": "columnwise_scale_inv",
        "_amax": "amax",
        "_columnwise_amax": "columnwise_amax",
        "scale": "scale",
        "first_dims": "first_dims",
        "last_dims": "last_dims",
        "tensor_offsets": "tensor_offsets",
    }
    CONSTANTS = {"_layout": "layout", "_quantizer": "quantizer", "_dtype": "dtype"}

    # The module of `GroupedTensor`, which builds on this one, assigns the constructors and the
    # function that returns the quantizer of a group.
    make_grouped_tensor: ClassVar[Any]
    make_grouped_tensor_with_shapes: ClassVar[Any]
    make_grouped_tensor_from_rowwise_data: ClassVar[Any]
    stack_quantizer: ClassVar[Any]
    rowwise_data: Tensor | None
    columnwise_data: Tensor | None

    def __init__(
        self,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_tensors: int | None = None,
        shapes: Sequence[Sequence[int]] | None = None,
        quantizer: Any = None,
        data: Tensor | None = None,
        columnwise_data: Tensor | None = None,
        scale_inv: Tensor | None = None,
        columnwise_scale_inv: Tensor | None = None,
        amax: Tensor | None = None,
        columnwise_amax: Tensor | None = None,
        scale: Tensor | None = None,
        first_dims: Tensor | None = None,
        last_dims: Tensor | None = None,
        tensor_offsets: Tensor | None = None,
        offsets: Sequence[int] | None = None,
        scale_inv_offsets: Sequence[int] | Tensor | None = None,
        columnwise_scale_inv_offsets: Sequence[int] | Tensor | None = None,
        requires_grad: bool = False,
        stride: Sequence[int] | None = None,
        with_gemm_swizzled_scales: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        layout: GroupLayout | None = None,
        rowwise_data: Tensor | None = None,
    ):
        self.rowwise_data, self.scale = data if rowwise_data is None else rowwise_data, scale
        self.columnwise_data, self.columnwise_scale_inv = columnwise_data, columnwise_scale_inv
        self.scale_inv, self._amax, self._columnwise_amax = scale_inv, amax, columnwise_amax
        self.first_dims, self.last_dims, self.tensor_offsets = first_dims, last_dims, tensor_offsets
        if layout is not None:
            self._layout, self._quantizer, self._dtype = layout, quantizer, dtype or torch.float32
            return
        variant = {
            "row_scaled_nvfp4": (row_scaled_nvfp4, False),
            "nvfp4_use_4over6": (nvfp4_use_4over6, False),
            "nvfp4_e4m3_max": (nvfp4_e4m3_max, 448),
        }
        check_variant(quantizer, variant)
        plain_dtype = torch.float32 if data is None or quantizer is not None else data.dtype
        self._dtype = plain_dtype if dtype is None else dtype
        chosen = member_shapes(shape, num_tensors, shapes, first_dims, last_dims)
        begins = tensor_offsets if offsets is None else offsets
        places = Offsets.read_on_host(begins, scale_inv_offsets, columnwise_scale_inv_offsets)
        self._bind_buffers(chosen, quantizer, places, with_gemm_swizzled_scales)

    def _bind_buffers(
        self, shapes: list[tuple[int, ...]], quantizer: Any, offsets: Offsets, swizzled: bool
    ) -> None:
        """Find the members in buffers that the caller has allocated; the buffers are shared."""
        for name in (*ROWWISE, *COLUMNWISE):
            tensor = getattr(self, name)
            if tensor is not None and tensor.dim() != 1:
                setattr(self, name, tensor.reshape(-1))
        buffers = {name: getattr(self, name) for name in (*ROWWISE, *COLUMNWISE)}
        members = place_members(shapes, quantizer, buffers, self._dtype, offsets, swizzled=swizzled)
        has_extents = (self.first_dims is not None, self.last_dims is not None)
        self._layout = GroupLayout.of(members, has_extents if any(has_extents) else None)
        self._quantizer = self.stack_quantizer(quantizer, shapes, not any(self._layout.varies))
        for name, numbers in varying_extents(self._layout, self.device).items():
            if getattr(self, name) is None:
                setattr(self, name, numbers)

    def _read_shapes(self) -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "the shapes of this group's matrices are on the GPU and cannot be read during graph capture; use the "
                "buffers, first_dims and tensor_offsets of the group instead of its members"
            )
        layout, quantizer = self._layout, self.quantizer
        shapes = member_shapes(layout.logical, layout.count, None, self.first_dims, self.last_dims)
        buffers = {name: getattr(self, name) for name in (*ROWWISE, *COLUMNWISE)}
        members = place_members(shapes, quantizer, buffers, self._dtype, Offsets())
        self._layout = replace(layout, members=members)
        self._quantizer = self.stack_quantizer(quantizer, shapes, False)

    def writer(self) -> Writer:
        if self._layout.members is None:
            self._read_shapes()  # the quantizer needs the shapes
        return super().writer()

    _get_quantizer = writer

    @classmethod
    def of(
        cls,
        members: Sequence[Tensor | QuantizedTensorStorage],
        quantizer: Writer | None,
        dtype: torch.dtype,
    ) -> GroupedTensorStorage:
        """Copy the members into a group, where each member tensor is contiguous in its buffer.

        Raises:
            NotImplementedError: The format of the members has other tensors than codes and scales.
        """
        parts = [member_tensors(member) for member in members]
        ends: dict[str, int] = dict.fromkeys((*ROWWISE, *COLUMNWISE), 0)
        results = []
        for member, tensors in zip(members, parts, strict=True):
            places = []
            for buffer, tensor in tensors.items():
                places.append(Place(buffer, ends[buffer], tuple(tensor.shape)))
                ends[buffer] += tensor.numel()
            results.append(
                GroupMember(tuple(member.shape), tuple(places), rebuild_arguments(member))
            )
        device = next(iter(parts[0].values())).device
        layout = GroupLayout.of(results)
        group = cls(
            layout=layout, quantizer=quantizer, dtype=dtype, **varying_extents(layout, device)
        )
        for buffer, end in ends.items():
            kinds = {tensors[buffer].dtype for tensors in parts if buffer in tensors}
            if kinds:
                setattr(group, buffer, torch.empty(end, dtype=kinds.pop(), device=device))
        for member, tensors in zip(results, parts, strict=True):
            for position, tensor in zip(member.places, tensors.values(), strict=True):
                group._at(position).copy_(tensor)
        if all(
            tensors.get("scale_inv") is tensors.get("columnwise_scale_inv") for tensors in parts
        ):
            group.columnwise_scale_inv = group.scale_inv  # members have one scale, which they write
        return group

    @classmethod
    def around(
        cls, shapes: Sequence[Sequence[int]], data: Tensor, quantizer: Writer | None
    ) -> GroupedTensorStorage:
        """Return plain matrices with these shapes in a shared buffer."""
        total = sum(prod(shape) for shape in shapes)
        if not shapes or data.numel() != total:
            raise ValueError(
                f"{len(shapes)} tensors of {total} elements do not fill a buffer of {data.numel()}; give "
                "one shape a tensor and a buffer of all elements"
            )
        members, begin = [], 0
        for shape in map(tuple, shapes):
            members.append(GroupMember(shape, (Place("rowwise_data", begin, shape),), None))
            begin += prod(shape)
        layout = GroupLayout.of(members)
        return cls(
            layout=layout,
            quantizer=quantizer,
            dtype=data.dtype,
            rowwise_data=data.reshape(-1),
            **varying_extents(layout, data.device),
        )

    def mapped(self, change: Callable[[Tensor], Tensor]) -> QuantizedTensorStorage:
        group: Any = super().mapped(change)
        if self.columnwise_scale_inv is self.scale_inv:
            group.columnwise_scale_inv = group.scale_inv
        return group

    def members(self) -> list[Any]:
        """Return the members, as storages or plain tensors over buffer views."""
        members: list[Any] = []
        for member in self._members:
            parts = {
                p.buffer: self._at(p) for p in member.places if getattr(self, p.buffer) is not None
            }
            if member.rebuild is None:
                members.append(parts["rowwise_data"])
                continue
            keywords = member.rebuild.storage_class.TENSORS.values()
            scale = parts.get("scale_inv", parts.get("columnwise_scale_inv"))
            if scale is not None and torch.compiler.is_compiling():
                # Products need aligned scales, and addresses are unknown during tracing.
                scale = scale.clone()
            tensors = [scale if k == ONE_SCALE else parts.get(BUFFERS[k]) for k in keywords]
            members.append(member.rebuild(tensors))
        return members

    def _at(self, position: Place) -> Tensor:
        buffer: Tensor = getattr(self, position.buffer)
        end = position.begin + prod(position.shape)
        return buffer[position.begin : end].view(position.shape)

    @property
    def format(self) -> TensorFormat:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.members()[0].format

    @property
    def fake_dtype(self) -> torch.dtype:
        return self._dtype

    # Otherwise `GroupedTensor.amax` would be the method of torch.Tensor.
    @property
    def amax(self) -> Tensor | None:
        return self._amax

    @property
    def columnwise_amax(self) -> Tensor | None:
        return self._columnwise_amax

    def has_data(self) -> bool:
        return self.rowwise_data is not None

    def has_columnwise_data(self) -> bool:
        return self.columnwise_data is not None

    def get_dtype(self) -> torch.dtype:
        return self._dtype

    def copy(self) -> GroupedTensorStorage:
        """Return another group that shares the buffers."""
        tensors, rebuild = QuantizedTensorStorage.flatten(self)
        return rebuild(tensors)  # pyright: ignore[reportReturnType]

    def contract(self, direction: str) -> Operand:
        raise TypeError(
            f"a group of {self.num_tensors} matrices is not an operand; multiply its members()"
        )

    @classmethod
    def pack(
        cls, quantized: Quantized, shape: Sequence[int], **constants: Any
    ) -> QuantizedTensorStorage:
        raise TypeError(
            "a group has codes of each member; make it of its members, GroupedTensorStorage.of(..)"
        )

    def decode(self, dtype: torch.dtype) -> Tensor:
        if self._members[0].rebuild is None:
            assert self.rowwise_data is not None
            return self.rowwise_data.view(self.shape).to(dtype)
        flat = torch.cat([member.decode(dtype).view(-1) for member in self.members()])
        if flat.numel() < prod(self.shape):  # rows behind the last matrix belong to none
            flat = torch.nn.functional.pad(flat, (0, prod(self.shape) - flat.numel()))
        return flat.view(self.shape)

    def plain_memory(self) -> Tensor | None:
        """Values [n, M, N] of plain matrices, on the memory of the group; None if it holds codes."""
        if self.rowwise_data is None or self.quantizer is not None:
            return None
        return self.rowwise_data.view(self.shape)

    def set_nominal_dtype(self, dtype: torch.dtype) -> None:
        """Present values in another dtype; plain values are converted, codes stay."""
        self._dtype = dtype
        if self.rowwise_data is not None and self.quantizer is None:
            self.rowwise_data = self.rowwise_data.to(dtype)

    def with_shape(self, shape: Sequence[int]) -> GroupedTensorStorage | None:
        return None

    @property
    def transposable(self) -> bool:
        return all(
            not isinstance(member, Tensor) and member.transposable for member in self.members()
        )

    def _mirror(self, direction: str, usage: str) -> None:
        """Create the missing direction by transposing the other one, member by member."""
        if not self.transposable:
            raise self._cannot_create(direction, usage)
        members = self.members()
        for member in members:
            member.update_usage(rowwise_usage=True, columnwise_usage=True)
        regrouped = GroupedTensorStorage.of(members, self._quantizer, self._dtype)
        regrouped.restore_extents(self.extents())
        for name in (*self.TENSORS, "_layout"):
            setattr(self, name, getattr(regrouped, name))

    def byte_layout(self) -> tuple[Any, ...]:
        return (self._layout,)

    def row_granularity(self) -> int:
        """Return the total row count: products cannot read a part of a group, so that only all rows are a slice."""
        return max(prod(self.shape[:-1]), 1)

    # Quantizer settings under the constructor's argument names.
    @property
    def row_scaled_nvfp4(self) -> bool:
        return getattr(self.quantizer, "row_scaled_nvfp4", False)

    @property
    def nvfp4_use_4over6(self) -> bool:
        return getattr(self.quantizer, "nvfp4_use_4over6", False)

    @property
    def nvfp4_e4m3_max(self) -> int:
        return getattr(self.quantizer, "nvfp4_e4m3_max", 448)

    @property
    def quantized_tensors(self) -> list[Tensor]:
        """The matrices, as `split_into_quantized_tensors` returns them."""
        return self.split_into_quantized_tensors()

    def split_into_quantized_tensors(self) -> list[Tensor]:
        """Return the matrices as tensors in their format that share the group's buffers.

        Shapes that only the GPU knows are read once; the host waits for it.
        """
        members = GroupedTensorStorage.members(self)
        writers: Any = self._quantizer
        if writers is None or writers.quantizers is None:
            return [member.detach() for member in members]
        return [q.wrap(member) for q, member in zip(writers.quantizers, members, strict=True)]

    def quantize(self, tensors: Sequence[Tensor], noop_flag: Tensor | None = None) -> list[Tensor]:
        """Write values into the matrices; nothing is written if one tensor has another shape.

        Args:
            tensors: One tensor for each matrix.
            noop_flag: Device flag; if it is set, the matrices keep their values.

        Returns:
            The matrices, as `split_into_quantized_tensors` returns them.
        """
        if [value.shape for value in tensors] != self.tensor_shapes:
            raise ValueError(
                f"tensors are {[list(value.shape) for value in tensors]}; give {[list(s) for s in self.tensor_shapes]}"
            )
        members: list[Any] = self.split_into_quantized_tensors()
        with torch.no_grad():
            for into, value in zip(members, tensors, strict=True):
                if isinstance(into, QuantizedTensorStorage):
                    into.quantize_(value, noop_flag=noop_flag)
                else:
                    selected = (
                        value
                        if noop_flag is None
                        else torch.where(noop_flag != 0, into, value.to(into))
                    )
                    into.copy_(selected)
            scales, copied = self.scale_inv, self.columnwise_scale_inv
            if (
                scales is not None
                and copied is not None
                and copied is not scales
                and has_one_scale(self._members)
            ):
                copied.copy_(scales)  # buffers of the caller, whose first elements members write
        return members

    make_tensor_offsets = staticmethod(make_tensor_offsets)
