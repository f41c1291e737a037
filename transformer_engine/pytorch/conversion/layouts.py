"""ours = join(theirs), theirs = split(ours): how one tensor of ours is made of those of another library, and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class Layout(ABC):
    """Two functions that undo each other; values are moved, never computed."""

    @abstractmethod
    def join(self, parts: list[Tensor]) -> Tensor:
        """Our tensor of theirs, in the order of the table."""

    @abstractmethod
    def split(self, tensor: Tensor) -> list[Tensor]:
        """Their tensors of ours. On the meta device: their shapes."""


@dataclass(frozen=True)
class Same(Layout):
    """The same values in the same order."""

    def join(self, parts: list[Tensor]) -> Tensor:
        return parts[0]

    def split(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]


@dataclass(frozen=True)
class Transposed(Layout):
    """A weight [in, out] of a library that multiplies x @ w; a bias is the same."""

    def join(self, parts: list[Tensor]) -> Tensor:
        return parts[0].t()

    def split(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.t()]


@dataclass(frozen=True)
class Stacked(Layout):
    """[gate; up]: equal parts, one under the other."""

    parts: int

    def join(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts)

    def split(self, tensor: Tensor) -> list[Tensor]:
        return list(tensor.chunk(self.parts))


@dataclass(frozen=True)
class Grouped(Layout):
    """[q; k; v] group by group, as a fused weight (or bias) holds them, of q [h d, ..], k [g d, ..], v [g d, ..]."""

    heads: int
    groups: int
    size: int

    def join(self, parts: list[Tensor]) -> Tensor:
        return torch.cat([part.unflatten(0, (self.groups, -1)) for part in parts], dim=1).flatten(0, 1)

    def split(self, tensor: Tensor) -> list[Tensor]:
        sizes = [self.heads // self.groups * self.size, self.size, self.size]
        grouped = tensor.unflatten(0, (self.groups, sum(sizes)))
        return [part.flatten(0, 1) for part in grouped.split(sizes, dim=1)]


@dataclass(frozen=True)
class GroupedInOne(Layout):
    """The same of one tensor [in, 3 h d] (or bias [3 h d]): all queries, all keys, all values."""

    grouped: Grouped

    def join(self, parts: list[Tensor]) -> Tensor:
        return self.grouped.join(list(parts[0].t().chunk(3)))

    def split(self, tensor: Tensor) -> list[Tensor]:
        return [torch.cat(self.grouped.split(tensor)).t()]
