"""GroupedTensorStorage: n matrices [M_i, N_i] of one format, their codes and scales member behind member in buffers.

Every buffer is flat. A member is a storage (or, of plain values, a tensor) of views of the buffers: what is written
into it is written into the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ....common.formats import TensorFormat
from ...primitives.operand import Operand
from ...primitives.quantize import Quantized
from .quantized_tensor_storage import QuantizedTensorStorage, Rebuild, Writer

__all__ = ["GroupedTensorStorage"]

# The buffer of a member's tensor, by the keyword that the member's storage has for it. The one scale of an FP8 tensor
# serves both directions, so it lies in the buffer of each that there is.
_BUFFERS = {
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
_ONE_SCALE = "fp8_scale_inv"
_ROWWISE = ("rowwise_data", "scale_inv", "_amax")
_COLUMNWISE = ("columnwise_data", "columnwise_scale_inv", "_columnwise_amax")


@dataclass(frozen=True)
class Place:
    """Where a tensor of a member lies: in this buffer, from this element on."""

    buffer: str
    begin: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Member:
    """One matrix: its shape, its tensors, and how a storage is made of them (None: it is the plain tensor)."""

    shape: tuple[int, ...]
    places: tuple[Place, ...]
    rebuild: Rebuild | None


class GroupedTensorStorage(QuantizedTensorStorage):
    """The buffers of a group, under the original's names.

    rowwise_data, columnwise_data, scale_inv, columnwise_scale_inv, amax, columnwise_amax   None where a format has none
    first_dims, last_dims, tensor_offsets   of members of unequal shapes: int64 on the device; None where all are equal
    scale                                   always None: quantizers have their scales
    """

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
    CONSTANTS = {"_members": "members", "_quantizer": "quantizer", "_dtype": "dtype"}

    rowwise_data: Tensor | None
    columnwise_data: Tensor | None
    _members: tuple[Member, ...]

    def __init__(
        self,
        *,
        members: tuple[Member, ...],
        quantizer: Writer | None = None,
        dtype: torch.dtype = torch.float32,
        **buffers: Tensor | None,
    ):
        self._members, self._quantizer, self._dtype = members, quantizer, dtype
        for name, keyword in self.TENSORS.items():
            setattr(self, name, buffers.get(keyword))

    @classmethod
    def of(
        cls,
        members: Sequence[Tensor | QuantizedTensorStorage],
        quantizer: Writer | None,
        dtype: torch.dtype,
    ) -> GroupedTensorStorage:
        """A group that holds a copy of the members; NotImplementedError where their format has other tensors."""
        parts = [_parts(member) for member in members]
        ends: dict[str, int] = dict.fromkeys((*_ROWWISE, *_COLUMNWISE), 0)
        made = []
        for member, held in zip(members, parts, strict=True):
            places = []
            for buffer, tensor in held.items():
                places.append(Place(buffer, ends[buffer], tuple(tensor.shape), _dense_stride(tensor)))
                ends[buffer] += tensor.numel()
            made.append(Member(tuple(member.shape), tuple(places), _rebuild_of(member)))
        device = next(iter(parts[0].values())).device
        group = cls(members=tuple(made), quantizer=quantizer, dtype=dtype, **_extents(made, device))
        for buffer, end in ends.items():
            kinds = {held[buffer].dtype for held in parts if buffer in held}
            if kinds:
                setattr(group, buffer, torch.empty(end, dtype=kinds.pop(), device=device))
        for member, held in zip(made, parts, strict=True):
            for place, tensor in zip(member.places, held.values(), strict=True):
                group._at(place).copy_(tensor)
        return group

    @classmethod
    def around(
        cls, shapes: Sequence[Sequence[int]], data: Tensor, quantizer: Writer | None
    ) -> GroupedTensorStorage:
        """Plain matrices of these shapes in a buffer, which is shared."""
        total = sum(prod(shape) for shape in shapes)
        if not shapes or data.numel() != total:
            raise ValueError(
                f"{len(shapes)} tensors of {total} elements do not fill a buffer of {data.numel()}; give "
                "one shape a tensor and a buffer of all elements"
            )
        members, begin = [], 0
        for shape in map(tuple, shapes):
            stride = torch.empty(shape, device="meta").stride()
            members.append(Member(shape, (Place("rowwise_data", begin, shape, stride),), None))
            begin += prod(shape)
        return cls(
            members=tuple(members),
            quantizer=quantizer,
            dtype=data.dtype,
            rowwise_data=data.reshape(-1),
            **_extents(members, data.device),
        )

    def members(self) -> list[Any]:
        """The members: storages, or plain tensors, of views of the buffers."""
        return [self._member(member) for member in self._members]

    def _member(self, member: Member) -> Any:
        parts = {p.buffer: self._at(p) for p in member.places if getattr(self, p.buffer) is not None}
        if member.rebuild is None:
            return parts["rowwise_data"]
        keywords = member.rebuild.storage_class.TENSORS.values()
        scale = parts.get("scale_inv", parts.get("columnwise_scale_inv"))
        if scale is not None and torch.compiler.is_compiling():
            scale = (
                scale.clone()
            )  # products take no scale at 4 bytes from another, and see no address while traced
        return member.rebuild([scale if k == _ONE_SCALE else parts.get(_BUFFERS[k]) for k in keywords])

    def _at(self, place: Place) -> Tensor:
        buffer: Tensor = getattr(self, place.buffer)
        end = place.begin + prod(place.shape)
        return buffer[place.begin : end].as_strided(place.shape, place.stride)

    @property
    def shape(self) -> torch.Size:
        """[n, M, N] of matrices of one shape, else their logical shape."""
        if self.all_same_shape():
            return torch.Size((len(self._members), *self._members[0].shape))
        return self.logical_shape

    @property
    def format(self) -> TensorFormat:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.members()[0].format

    @property
    def num_tensors(self) -> int:
        return len(self._members)

    @property
    def tensor_shapes(self) -> list[torch.Size]:
        return [torch.Size(member.shape) for member in self._members]

    @property
    def offsets(self) -> list[int]:
        """Where each member's values begin, in elements."""
        return make_tensor_offsets([prod(member.shape) for member in self._members], 1)[:-1]

    @property
    def fake_dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def amax(self) -> Tensor | None:
        return self._amax  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def columnwise_amax(self) -> Tensor | None:
        return self._columnwise_amax  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def logical_shape(self) -> torch.Size:
        """(n M, N) of equal shapes; (sum M_i, N), (M, sum N_i) where one extent is common; else (1, total)."""
        firsts, lasts = self._along(0), self._along(-1)
        if self.all_same_last_dim():
            return torch.Size((sum(firsts), lasts[0]))
        if self.all_same_first_dim():
            return torch.Size((firsts[0], sum(lasts)))
        return torch.Size((1, sum(prod(member.shape) for member in self._members)))

    def has_data(self) -> bool:
        return self.rowwise_data is not None

    def has_columnwise_data(self) -> bool:
        return self.columnwise_data is not None

    def all_same_first_dim(self) -> bool:
        return len(set(self._along(0))) == 1

    def all_same_last_dim(self) -> bool:
        return len(set(self._along(-1))) == 1

    def all_same_shape(self) -> bool:
        return len({member.shape for member in self._members}) == 1

    def varying_both_dims(self) -> bool:
        return not (self.all_same_first_dim() or self.all_same_last_dim())

    def get_common_first_dim(self) -> int:
        """The first extent of every matrix; RuntimeError where they differ."""
        return self._common(0, "first")

    def get_common_last_dim(self) -> int:
        """The last extent of every matrix; RuntimeError where they differ."""
        return self._common(-1, "last")

    def get_dtype(self) -> torch.dtype:
        return self._dtype

    def copy(self) -> GroupedTensorStorage:
        """Another group around the same buffers."""
        tensors, rebuild = QuantizedTensorStorage.flatten(self)
        return rebuild(tensors)  # pyright: ignore[reportReturnType]

    def _along(self, axis: int) -> list[int]:
        return [member.shape[axis] for member in self._members]

    def _common(self, axis: int, name: str) -> int:
        extents = self._along(axis)
        if len(set(extents)) > 1:
            raise RuntimeError(f"the {name} extents {extents} differ; ask all_same_{name}_dim() before")
        return extents[0]

    def contract(self, axis: str) -> Operand:
        raise TypeError(f"a group of {self.num_tensors} matrices is no operand; multiply its members()")

    @classmethod
    def pack(cls, quantized: Quantized, shape: Sequence[int], **constants: Any) -> QuantizedTensorStorage:
        raise TypeError(
            "a group has codes of each member; make it of its members, GroupedTensorStorage.of(..)"
        )

    def get_usages(self) -> dict[str, bool]:
        return {"rowwise": self.has_data(), "columnwise": self.has_columnwise_data()}

    def decode(self, dtype: torch.dtype) -> Tensor:
        if self._members[0].rebuild is None:
            assert self.rowwise_data is not None
            return self.rowwise_data.view(self.shape).to(dtype)
        return torch.cat([member.decode(dtype).view(-1) for member in self.members()]).view(self.shape)

    def viewed(self, shape: Sequence[int]) -> GroupedTensorStorage | None:
        return None

    @property
    def transposable(self) -> bool:
        return all(not isinstance(member, Tensor) and member.transposable for member in self.members())

    def _mirror(self, direction: str, usage: str) -> None:
        """Make the direction that is missing by transposing the other one, member by member."""
        if not self.transposable:
            raise self._cannot_create(direction, usage)
        members = self.members()
        for member in members:
            member.update_usage(rowwise_usage=True, columnwise_usage=True)
        whole = GroupedTensorStorage.of(members, self._quantizer, self._dtype)
        for name in (*self.TENSORS, "_members"):
            setattr(self, name, getattr(whole, name))

    @classmethod
    def _dropped(cls, rowwise: bool, columnwise: bool) -> tuple[str, ...]:
        return _ROWWISE * rowwise + _COLUMNWISE * columnwise

    def byte_layout(self) -> tuple[Any, ...]:
        return self._members

    def row_granularity(self) -> int:
        """A cut between members is none of codes that products read, so only the whole is a slice."""
        return max(prod(self.shape[:-1]), 1)

    @staticmethod
    def make_tensor_offsets(split_dims: Sequence[int], common_dim: int) -> list[int]:
        """[0, cumulative split * common]: where each matrix begins, and the end."""
        return make_tensor_offsets(split_dims, common_dim)


def _parts(member: Tensor | QuantizedTensorStorage) -> dict[str, Tensor]:
    """{buffer: tensor} of a member."""
    if not isinstance(member, QuantizedTensorStorage):
        return {"rowwise_data": member}
    tensors = {keyword: getattr(member, name) for name, keyword in member.TENSORS.items()}
    if not tensors.keys() <= {*_BUFFERS, _ONE_SCALE}:
        raise NotImplementedError(
            f"matrices of {type(member).__name__} do not go into one buffer: it holds other tensors than codes and "
            "scales; keep one tensor a group (single_grouped_weight=False)"
        )
    scale = tensors.pop(_ONE_SCALE, None)
    parts = {_BUFFERS[keyword]: tensor for keyword, tensor in tensors.items() if tensor is not None}
    if scale is not None:
        for codes, scales in (_ROWWISE[:2], _COLUMNWISE[:2]):
            if codes in parts:
                parts[scales] = scale
    return parts


def _rebuild_of(member: Tensor | QuantizedTensorStorage) -> Rebuild | None:
    return QuantizedTensorStorage.flatten(member)[1] if isinstance(member, QuantizedTensorStorage) else None


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Column-wise codes may lie K-last under a transposed view, as products read them; all else is row after row."""
    if tensor.dim() == 2 and tensor.t().is_contiguous():
        return tensor.stride()
    return torch.empty(tensor.shape, device="meta").stride()


def _extents(members: Sequence[Member], device: torch.device) -> dict[str, Any]:
    """first_dims, last_dims [n] and tensor_offsets [n + 1] of members whose shapes differ."""
    if len({member.shape for member in members}) == 1:
        return {}
    offsets = make_tensor_offsets([prod(member.shape) for member in members], 1)
    numbers = {
        "first_dims": [member.shape[0] for member in members],
        "last_dims": [member.shape[-1] for member in members],
        "tensor_offsets": offsets,
    }
    return {name: torch.tensor(values, dtype=torch.int64, device=device) for name, values in numbers.items()}


def make_tensor_offsets(split_dims: Sequence[int], common_dim: int) -> list[int]:
    """[0, cumulative split * common]"""
    offsets = [0]
    for split in split_dims:
        offsets.append(offsets[-1] + split * common_dim)
    return offsets
