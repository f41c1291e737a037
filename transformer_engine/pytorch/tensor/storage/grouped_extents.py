"""Extents of the matrices of a group: common, varying and logical shapes, and offsets in the group's buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch

from .grouped_layout import (
    SCALES,
    GroupLayout,
    GroupMember,
    member_starts,
    running_ends,
    varying_extents,
)


class GroupExtents:
    """Shapes and offsets of a group, from its layout."""

    _layout: GroupLayout
    _quantizer: Any
    device: torch.device

    @property
    def _members(self) -> tuple[GroupMember, ...]:
        """Member positions; the first access after a cast on the device reads their shapes."""
        if self._layout.members is None:
            self._read_shapes()
        members = self._layout.members
        assert members is not None
        return members

    def _read_shapes(self) -> None:
        raise NotImplementedError

    @property
    def shape(self) -> torch.Size:
        """[n, M, N] for equally shaped matrices, otherwise their logical shape."""
        if self.all_same_shape():
            return torch.Size((len(self._members), *self._members[0].shape))
        return self.logical_shape

    @property
    def num_tensors(self) -> int:
        return self._layout.count

    @property
    def tensor_shapes(self) -> list[torch.Size]:
        return [torch.Size(member.shape) for member in self._members]

    @property
    def logical_shape(self) -> torch.Size:
        """(n M, N) for equal shapes; (sum M_i, N), (M, sum N_i) if one extent is common; otherwise (1, total)."""
        return torch.Size(self._layout.logical)

    @property
    def offsets(self) -> list[int] | None:
        """First element in each member's values, and the end; None while only the device knows the shapes."""
        members = self._layout.members
        return None if members is None else running_ends([prod(member.shape) for member in members])

    @property
    def scale_inv_offsets(self) -> list[int] | None:
        """First row-wise scale of each member, and the end, under the same condition as `offsets`."""
        return member_starts(self._layout, "scale_inv")

    @property
    def columnwise_scale_inv_offsets(self) -> list[int] | None:
        """First column-wise scale of each member, and the end, under the same condition as `offsets`."""
        return member_starts(self._layout, "columnwise_scale_inv")

    @property
    def _with_gemm_swizzled_scales(self) -> bool:
        """Whether all matrices' scales are in matrix-instruction order."""
        return self._layout.has_swizzled_scales

    def members(self) -> list[Any]:
        raise NotImplementedError

    def swizzle_(self) -> None:
        """Put one-byte scales in matrix-instruction order, matrix by matrix, in the buffers."""
        members = self.members()
        for member in members:
            member.swizzle_()
        self._layout = self._layout.copy_scales(
            members, {name: getattr(self, name) for name in SCALES}
        )

    def all_same_first_dim(self) -> bool:
        return not self._layout.varies[0]

    def all_same_last_dim(self) -> bool:
        return not self._layout.varies[1]

    def all_same_shape(self) -> bool:
        return not any(self._layout.varies)

    def varying_both_dims(self) -> bool:
        return all(self._layout.varies)

    def get_common_first_dim(self) -> int:
        """Return the first extent of every matrix; RuntimeError if they differ."""
        return self._common(0, "first")

    def get_common_last_dim(self) -> int:
        """Return the last extent of every matrix; RuntimeError if they differ."""
        return self._common(-1, "last")

    def _common(self, axis: int, name: str) -> int:
        layout = self._layout
        if not layout.varies[axis]:
            return (
                layout.logical[-1]
                if axis
                else layout.logical[0] // (1 if layout.varies[1] else layout.count)
            )
        extents = [member.shape[axis] for member in self._members]
        raise RuntimeError(f"the {name} extents {extents} differ; ask all_same_{name}_dim() before")

    @property
    def quantizer(self) -> Any:
        """Quantizer of the first matrix; None for plain values."""
        own = self._quantizer
        return None if own is None or own.quantizers is None else own.quantizers[0]

    def count_as_varying(self, varies: tuple[bool, bool]) -> None:
        """Describe first or last extents as varying, also if they are equal; see `GroupLayout.of`."""
        self._layout = GroupLayout.of(self._members, varies)
        vars(self).update(varying_extents(self._layout, self.device))

    def extents(self) -> dict[str, Any]:
        """Shapes, offsets, maxima and multipliers, which the members do not store."""
        names = ("first_dims", "last_dims", "tensor_offsets", "amax", "columnwise_amax", "scale")
        extents: dict[str, Any] = {name: getattr(self, name) for name in names}
        return extents | {"logical": self._layout.logical, "varies": self._layout.varies}

    def restore_extents(self, extents: Mapping[str, Any]) -> None:
        """Describe the same members by the `extents` of another group, which may count equal shapes as varying."""
        shapes = {name: extents[name] for name in ("logical", "varies")}
        self._layout = replace(self._layout, **shapes)
        names = {"amax": "_amax", "columnwise_amax": "_columnwise_amax"}
        for name in extents.keys() - shapes.keys():
            if extents[name] is not None:
                setattr(self, names.get(name, name), extents[name])
