"""Layout of a grouped tensor: the flat buffer that holds each tensor of a member, and its position there."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from ....common.checks import whole
from .quantized_tensor_storage import QuantizedTensorStorage, Rebuild, Writer

# The buffer for a member's tensor, by the keyword of the member's storage. The single scale of an
# FP8 tensor serves both directions, so each direction's buffer holds it.
BUFFERS = {
    "data": "rowwise_data",
    "hp_data": "rowwise_data",
    "rowwise_data": "rowwise_data",
    "data_transpose": "columnwise_data",
    "columnwise_data": "columnwise_data",
    "rowwise_scale_inv": "scale_inv",
    "columnwise_scale_inv": "columnwise_scale_inv",
    "amax_rowwise": "_amax",
    "amax_columnwise": "_columnwise_amax",
}
ONE_SCALE = "fp8_scale_inv"
ROWWISE = ("rowwise_data", "scale_inv", "_amax")
COLUMNWISE = ("columnwise_data", "columnwise_scale_inv", "_columnwise_amax")
SCALES = ("scale_inv", "columnwise_scale_inv")


@dataclass(frozen=True)
class Place:
    """Position of one tensor of a member: the buffer's name, its first element and shape; it is contiguous.

    Attributes:
        buffer: Name of the buffer.
        begin: Index of the first element in the buffer.
        shape: Tensor shape.
    """

    buffer: str
    begin: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class GroupLayout:
    """Extents of a group and, once they are known on the host, the positions of its members.

    Attributes:
        count: Matrix count.
        logical: Logical shape: [n M, N] for equal shapes, [sum M_i, N], [M, sum N_i], or [1, total].
        varies: Whether first and last extents vary between the matrices.
        members: Member positions; None until `first_dims` and `last_dims` have been read from the device.
    """

    count: int
    logical: tuple[int, ...]
    varies: tuple[bool, bool]
    members: tuple[GroupMember, ...] | None = None

    @property
    def has_swizzled_scales(self) -> bool:
        """Whether all matrices' scales are known to be in matrix-instruction order."""
        rebuilds = [member.rebuild for member in self.members or ()]
        return bool(rebuilds) and all(
            rebuild is not None and dict(rebuild.constants).get("with_gemm_swizzled_scales", False)
            for rebuild in rebuilds
        )

    def copy_scales(
        self, members: Sequence[QuantizedTensorStorage], buffers: Mapping[str, Tensor | None]
    ) -> GroupLayout:
        """Copy the members' scales to their places in the buffers, and return the new layout."""
        assert self.members is not None
        copied = []
        for placed, member in zip(self.members, members, strict=True):
            parts = member_tensors(member)
            for position in placed.places:
                buffer = buffers.get(position.buffer)
                if buffer is not None:
                    end = position.begin + prod(position.shape)
                    buffer[position.begin : end].view(position.shape).copy_(parts[position.buffer])
            copied.append(replace(placed, rebuild=rebuild_arguments(member)))
        return replace(self, members=tuple(copied))

    @classmethod
    def of(
        cls, members: Sequence[GroupMember], varies: tuple[bool, bool] | None = None
    ) -> GroupLayout:
        """Describe members whose shapes are known.

        Args:
            members: At least one member.
            varies: Which extents count as varying; by default those that differ.
        """
        first_dims, last_dims = ([member.shape[axis] for member in members] for axis in (0, -1))
        if varies is None:
            varies = (len(set(first_dims)) > 1, len(set(last_dims)) > 1)
        if not varies[1]:
            logical = (sum(first_dims), last_dims[0])
        else:
            logical = (
                (first_dims[0], sum(last_dims))
                if not varies[0]
                else (1, sum(prod(m.shape) for m in members))
            )
        return cls(len(members), logical, varies, tuple(members))


@dataclass(frozen=True)
class GroupMember:
    """One matrix: its shape, the positions of its tensors, and how to rebuild its storage (None: a plain tensor).

    Attributes:
        shape: Matrix shape.
        places: Positions of the matrix's tensors.
        rebuild: How the storage is rebuilt from the tensors; None for a plain tensor.
    """

    shape: tuple[int, ...]
    places: tuple[Place, ...]
    rebuild: Rebuild | None


def member_tensors(member: Tensor | QuantizedTensorStorage) -> dict[str, Tensor]:
    """Return {buffer: tensor} of a member."""
    if not isinstance(member, QuantizedTensorStorage):
        return {"rowwise_data": member}
    tensors = {keyword: getattr(member, name) for name, keyword in member.TENSORS.items()}
    if not tensors.keys() <= {*BUFFERS, ONE_SCALE}:
        raise NotImplementedError(
            f"matrices of {type(member).__name__} do not go into one buffer: it holds other tensors than codes and "
            "scales; keep one tensor a group (single_grouped_weight=False)"
        )
    scale = tensors.pop(ONE_SCALE, None)
    parts = {BUFFERS[keyword]: tensor for keyword, tensor in tensors.items() if tensor is not None}
    if scale is not None:
        for codes, scales in (ROWWISE[:2], COLUMNWISE[:2]):
            if codes in parts:
                parts[scales] = scale
    return parts


def rebuild_arguments(member: Tensor | QuantizedTensorStorage) -> Rebuild | None:
    return (
        QuantizedTensorStorage.flatten(member)[1]
        if isinstance(member, QuantizedTensorStorage)
        else None
    )


def has_one_scale(members: Sequence[GroupMember]) -> bool:
    """Whether each member has one scale for both directions."""
    rebuild = members[0].rebuild
    return rebuild is not None and ONE_SCALE in rebuild.storage_class.TENSORS.values()


def varying_extents(layout: GroupLayout, device: torch.device) -> dict[str, Any]:
    """Varying extents as tensors: first_dims, last_dims [n] and, if any vary, tensor_offsets [n + 1]."""
    if layout.members is None or not any(layout.varies):
        return {}
    shapes = [member.shape for member in layout.members]
    numbers = {"tensor_offsets": running_ends([prod(shape) for shape in shapes])}
    for name, axis, varies in zip(("first_dims", "last_dims"), (0, -1), layout.varies, strict=True):
        if varies:
            numbers[name] = [shape[axis] for shape in shapes]
    return {
        name: torch.tensor(values, dtype=torch.int64, device=device)
        for name, values in numbers.items()
    }


def running_ends(extents: Sequence[int]) -> list[int]:
    """Running sum over n extents, with a leading zero: n + 1 numbers."""
    return list(itertools.accumulate(extents, initial=0))


def make_tensor_offsets(split_dims: Tensor | Sequence[int], common_dim: int) -> Tensor:
    """First element of every matrix [split, common_dim] in the buffer, and the end: int64 [n + 1].

    Args:
        split_dims: The varying extent of every matrix, integers [n]; a tensor stays on its device.
        common_dim: The common extent.
    """
    if not isinstance(split_dims, Tensor):
        split_dims = torch.tensor(split_dims, dtype=torch.int64, device="cpu")
    return torch.nn.functional.pad((split_dims.to(torch.int64) * common_dim).cumsum(0), (1, 0))


def member_starts(layout: GroupLayout, buffer: str) -> list[int] | None:
    """First element of each member in a buffer, and the end; None if shapes are unknown or the buffer is unused."""
    places = [p for member in layout.members or () for p in member.places if p.buffer == buffer]
    if not places:
        return None
    last = places[-1]
    return [*[position.begin for position in places], last.begin + prod(last.shape)]


@dataclass(frozen=True)
class Offsets:
    """The members' first elements in caller-owned buffers; None: one member after the other.

    Attributes:
        values: Of the codes, counted in values.
        scales: Of the row-wise scales.
        columnwise_scales: Of the column-wise scales.
    """

    values: Sequence[int] | None = None
    scales: Sequence[int] | None = None
    columnwise_scales: Sequence[int] | None = None

    @classmethod
    def read_on_host(cls, *offsets: Tensor | Sequence[int] | None) -> Offsets:
        """Return offsets whose device tensors are read; this waits for the device."""
        return cls(*map(host_numbers, offsets))

    def of(self, buffer: str) -> Sequence[int] | None:
        """Return the offsets of one buffer."""
        offsets = {
            "rowwise_data": self.values,
            "columnwise_data": self.values,
            "scale_inv": self.scales,
            "columnwise_scale_inv": self.columnwise_scales,
        }
        return offsets.get(buffer)


def check_variant(quantizer: Any, settings: Mapping[str, tuple[Any, Any]]) -> None:
    """Check keywords that repeat quantizer settings.

    Args:
        quantizer: Quantizer of the group; None: plain values.
        settings: By quantizer attribute, the given value and the value for a quantizer without the attribute.

    Raises:
        ValueError: A setting differs from the quantizer's.
    """
    for name, (value, default) in settings.items():
        expected = default if quantizer is None else vars(quantizer).get(name, default)
        if value not in (expected, default):
            raise ValueError(
                f"{name}={value} differs from the quantizer's {name}={expected}; set it on the quantizer"
            )


def host_numbers(numbers: Tensor | Sequence[int] | None) -> list[int] | None:
    """Return numbers as a list on the host; a device tensor is read, which waits for the device."""
    if numbers is None:
        return None
    return numbers.tolist() if isinstance(numbers, Tensor) else [int(number) for number in numbers]


def member_shapes(
    shape: Sequence[int] | None,
    num_tensors: int | None,
    shapes: Sequence[Sequence[int]] | None,
    first_dims: Tensor | Sequence[int] | None,
    last_dims: Tensor | Sequence[int] | None,
) -> list[tuple[int, ...]]:
    """Return the shape of each member.

    Args:
        shape: [n, M, N] for equal members, or the logical shape: [n M, N] for equal members, [sum
            M_i, N] or [M, sum N_i] where one extent varies.
        num_tensors: n.
        shapes: The shape of each member, if the caller knows them.
        first_dims: M_i; None if all are equal.
        last_dims: N_i; None if all are equal.

    Raises:
        TypeError: num_tensors is missing.
        ValueError: The numbers contradict each other.
    """
    if num_tensors is None:
        raise TypeError("a grouped tensor needs num_tensors, the number of matrices")
    whole("num_tensors", num_tensors)
    if shapes is not None:
        if len(shapes) != num_tensors:
            raise ValueError(
                f"{len(shapes)} shapes for num_tensors={num_tensors}; give one per tensor"
            )
        return [tuple(int(extent) for extent in member_shape) for member_shape in shapes]
    first_numbers, last_numbers = host_numbers(first_dims), host_numbers(last_dims)
    for name, extents in (("first_dims", first_numbers), ("last_dims", last_numbers)):
        if extents is not None and len(extents) != num_tensors:
            raise ValueError(
                f"{name} has {len(extents)} numbers for num_tensors={num_tensors}; give one per tensor"
            )
    if shape is None and (first_numbers is None or last_numbers is None):
        raise ValueError(
            "the shapes of the tensors are unknown; give shape, shapes, or first_dims and last_dims"
        )
    if first_numbers is None and last_numbers is None:
        assert shape is not None
        if len(shape) == 3 and shape[0] == num_tensors:
            return [tuple(shape[1:])] * num_tensors
        if shape[0] % num_tensors:
            raise ValueError(
                f"num_tensors={num_tensors} does not divide the first extent of shape={tuple(shape)}; give shapes"
            )
        return [(shape[0] // num_tensors, *shape[1:])] * num_tensors
    if first_numbers is None:
        assert shape is not None
        first_numbers = [int(shape[0])] * num_tensors
    if last_numbers is None:
        assert shape is not None
        last_numbers = [int(shape[-1])] * num_tensors
    return list(zip(first_numbers, last_numbers, strict=True))


def place_members(
    shapes: Sequence[tuple[int, ...]],
    quantizer: Writer | None,
    buffers: Mapping[str, Tensor | None],
    dtype: torch.dtype,
    offsets: Offsets,
    *,
    swizzled: bool = False,
) -> tuple[GroupMember, ...]:
    """Return the members in buffers that the caller filled, or will fill.

    Args:
        shapes: Shape of each member.
        quantizer: Decides the tensors of each member; None: plain values.
        buffers: The flat buffers by attribute name.
        dtype: Nominal dtype.
        offsets: First elements in the buffers.
        swizzled: One-byte scales are in matrix-instruction order, member by member.

    Raises:
        ValueError: A buffer is missing or too short.
    """
    usages = {
        "rowwise": buffers["rowwise_data"] is not None,
        "columnwise": buffers["columnwise_data"] is not None,
    }
    if quantizer is not None:
        quantizer = quantizer.copy()
        quantizer.set_usage(**usages)
        quantizer.optimize_for_gemm = swizzled  # pyright: ignore[reportAttributeAccessIssue]
    ends: dict[str, int] = {}
    members = []
    for number, shape in enumerate(shapes):
        example: Any = torch.empty(shape, dtype=dtype, device="meta")
        if quantizer is not None:
            example = quantizer.empty(shape, dtype, "meta", False)
        places = []
        for buffer, tensor in member_tensors(example).items():
            starts = offsets.of(buffer)
            begin = ends.get(buffer, 0) if starts is None else int(starts[number])
            if starts is not None and buffer.endswith("_data"):
                begin = begin * tensor.numel() // max(prod(shape), 1)  # codes may be packed
            places.append(Place(buffer, begin, tuple(tensor.shape)))
            ends[buffer] = max(ends.get(buffer, 0), begin + tensor.numel())
        members.append(GroupMember(tuple(shape), tuple(places), rebuild_arguments(example)))
    for buffer, end in ends.items():
        memory = buffers[buffer]
        if memory is None or memory.numel() < end:
            raise ValueError(
                f"{buffer.lstrip('_')} has {0 if memory is None else memory.numel()} elements; "
                f"{len(shapes)} tensors of shapes {[tuple(shape) for shape in shapes]} need {end}"
            )
    return tuple(members)
