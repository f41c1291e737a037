"""ours = join(theirs), theirs = split(ours): conversion between one tensor of ours and another library's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class WeightLayout(ABC):
    """Two inverse functions, which move values and compute none."""

    @abstractmethod
    def join(self, parts: list[Tensor]) -> Tensor:
        """Build our tensor from theirs, given in table order."""

    @abstractmethod
    def split(self, tensor: Tensor) -> list[Tensor]:
        """Build their tensors from ours; on the meta device, to learn their shapes."""


@dataclass(frozen=True)
class Unchanged(WeightLayout):
    """The same values in the same order."""

    def join(self, parts: list[Tensor]) -> Tensor:
        return parts[0]

    def split(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]


@dataclass(frozen=True)
class Transposed(WeightLayout):
    """A weight [in, out] from a library that multiplies x @ w; a bias is the same."""

    def join(self, parts: list[Tensor]) -> Tensor:
        return parts[0].t()

    def split(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.t()]


@dataclass(frozen=True)
class Stacked(WeightLayout):
    """[gate; up]: equal parts, concatenated along the first axis."""

    parts: int

    def join(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts)

    def split(self, tensor: Tensor) -> list[Tensor]:
        return list(tensor.chunk(self.parts))


@dataclass(frozen=True)
class Grouped(WeightLayout):
    """The fused weight (or bias) [q; k; v] group by group, from q [h d, ..], k [g d, ..] and v [g d, ..]."""

    heads: int
    groups: int
    size: int

    def join(self, parts: list[Tensor]) -> Tensor:
        return torch.cat([part.unflatten(0, (self.groups, -1)) for part in parts], dim=1).flatten(
            0, 1
        )

    def split(self, tensor: Tensor) -> list[Tensor]:
        sizes = [self.heads // self.groups * self.size, self.size, self.size]
        grouped = tensor.unflatten(0, (self.groups, sum(sizes)))
        return [part.flatten(0, 1) for part in grouped.split(sizes, dim=1)]


@dataclass(frozen=True)
class GroupedInOne(WeightLayout):
    """`Grouped` from one tensor [in, 3 h d] (or bias [3 h d]) with all queries, all keys, all values."""

    grouped: Grouped

    def join(self, parts: list[Tensor]) -> Tensor:
        return self.grouped.join(list(parts[0].t().chunk(3)))

    def split(self, tensor: Tensor) -> list[Tensor]:
        return [torch.cat(self.grouped.split(tensor)).t()]
