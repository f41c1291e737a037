"""q, k, v of one projection: how heads are ordered in it, and how they turn with their tokens' positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..functions.split_heads import split_heads
from ..primitives.rope import Positions, RopeSpec, check_rotation
from .rope import rotated, rotated_qkv


@dataclass(frozen=True)
class Heads:
    """Heads of one tensor-parallel rank, and how their projections are ordered in a fused weight.

    interleaved   group by group (the group's queries, its key, its value), else all queries, all keys, all
                  values
    """

    queries: int
    groups: int
    size: int
    interleaved: bool

    def split_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [.., h, d], k [.., g, d], v [.., g, d] of x [.., (h + 2 g) d]."""
        return split_heads(x, self.queries, self.groups, self.size, self.interleaved)

    def grouped(self, x: Tensor) -> Tensor | None:
        """x [.., (h + 2 g) d] as [.., g, (h / g + 2) d], group by group; None where groups do not lie so."""
        if not self.interleaved and self.groups > 1:
            return None
        return x.unflatten(-1, (self.groups, -1))

    def split_kv(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """k [.., g, d], v [.., g, d] of x [.., 2 g d]."""
        if self.interleaved:
            k, v = x.unflatten(-1, (self.groups, 2 * self.size)).chunk(2, dim=-1)
        else:
            k, v = x.unflatten(-1, (2 * self.groups, self.size)).chunk(2, dim=-2)
        return k, v

    def split_q(self, x: Tensor) -> Tensor:
        """q [.., h, d] of x [.., h d]."""
        return x.unflatten(-1, (self.queries, self.size))


class Rotation(NamedTuple):
    """The rotary embedding of one call: angles of queries and keys, positions before, bounds of thd sequences.

    spec   with clamps where the caller has seen that the tables reach as far as all real tokens
    """

    angles: tuple[Tensor, Tensor]
    spec: RopeSpec
    before: Tensor | None
    bounds: tuple[Tensor | None, Tensor | None]

    def check(self, q: Any, k: Any) -> None:
        """ValueError unless the tables fit q [.., h, d] and k [.., g, d], of which shapes are read."""
        for x, angles, bounds in zip((q, k), self.angles, self.bounds, strict=True):
            check_rotation(x, angles, Positions(self.before, bounds), self.spec, x.shape[-1])

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [.., h, d] and k [.., g, d], rotated; the layer has checked them, unless a compiler traces it."""
        if torch.compiler.is_compiling():
            self.check(q, k)
        q = rotated(q, self.angles[0], self.spec, Positions(self.before, self.bounds[0]))
        return q, rotated(k, self.angles[1], self.spec, Positions(self.before, self.bounds[1]))

    def of_projection(self, grouped: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of a projection [.., g, (h / g + 2) d], q and k rotated, in one pass."""
        each = heads.queries // heads.groups
        sizes = (each * heads.size, heads.size, heads.size)
        return rotated_qkv(grouped, self.angles, sizes, self.spec, Positions(self.before, self.bounds[0]))
