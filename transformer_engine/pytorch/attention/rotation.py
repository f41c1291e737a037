"""Rotation of the queries and keys in one call by their token positions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..primitives.rope import Positions, RopeSpec, check_rotation, reaches_lengths
from ..runtime.device_checks import demand
from .heads import Heads
from .inference import InferenceParams
from .rope import rotate, rotate_qkv

Pair = tuple[Tensor | None, Tensor | None]


class Rotation(NamedTuple):
    """Rotary embedding of one call: query and key angles, start positions, and thd sequence bounds.

    Attributes:
        angles: Query and key angles.
        spec: Settings, with `clamps` if the caller has checked that the tables cover all tokens except padding.
        before: First token position in each sequence; None: 0.
        bounds: cu_seqlens for queries and keys.
    """

    angles: tuple[Tensor, Tensor]
    spec: RopeSpec
    before: Tensor | None
    bounds: tuple[Tensor | None, Tensor | None]

    def facts(self) -> tuple[torch.Size, torch.Size, RopeSpec] | None:
        """Return all `check` inputs except q and k; None if the check reads numbers in tensors."""
        if self.before is not None or self.spec.tensor_format == "thd":
            return None
        return self.angles[0].shape, self.angles[1].shape, self.spec

    def check(self, q: Any, k: Any) -> None:
        """Raise ValueError unless the tables fit q [.., h, d] and k [.., g, d]; only shapes are read."""
        for x, angles, bounds in zip((q, k), self.angles, self.bounds, strict=True):
            check_rotation(x, angles, Positions(self.before, bounds), self.spec, x.shape[-1])

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return q [.., h, d] and k [.., g, d], rotated; the layer has checked them, except while a compiler traces."""
        if torch.compiler.is_compiling():
            self.check(q, k)
        q = rotate(q, self.angles[0], self.spec, Positions(self.before, self.bounds[0]))
        return q, rotate(k, self.angles[1], self.spec, Positions(self.before, self.bounds[1]))

    def rotate_projection(self, x: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v from a projection [.., (h + 2 g) d], with q and k rotated, in one pass."""
        queries_per_group = heads.queries // heads.groups
        sizes = (queries_per_group * heads.size, heads.size, heads.size)
        positions = Positions(self.before, self.bounds[0])
        # one group has the same order in both layouts
        separate = not heads.interleaved and heads.groups > 1
        count = heads.queries + 2 * heads.groups if separate else heads.groups
        return rotate_qkv(
            x.unflatten(-1, (count, -1)), self.angles, sizes, self.spec, positions, separate
        )


def plan_rotation(
    rotary_pos_emb: Tensor | tuple[Tensor, Tensor],
    spec: RopeSpec,
    shares_lengths: bool,
    cache: InferenceParams | None,
    bounds: Pair,
    padded: Pair,
) -> Rotation:
    """Return the rotation for a call, whose positions continue after the cached tokens.

    Args:
        rotary_pos_emb: Angles, or (query angles, key angles).
        spec: Rotation settings.
        shares_lengths: By default, keys have the queries' lengths.
        cache: Cache with earlier tokens, or None.
        bounds: cu_seqlens for queries and keys.
        padded: Query and key sequence starts, if there are tokens between them.
    """
    angles = (
        rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
    )
    before = None
    if cache is not None:
        longest, positions = (
            max(cache.sequences.values(), default=0),
            min(x.shape[0] for x in angles),
        )
        if longest > positions:
            raise ValueError(
                f"a sequence of the step has {longest} tokens, cached ones included, > {positions} positions of "
                "rotary_pos_emb; make it longer"
            )
        before = cache.get_seqlens_pre_step()
        if bounds[0] is None:
            bounds = (cache.cu_seqlens_q, bounds[1])
    (starts_q, starts_kv), (padded_q, padded_kv) = bounds, padded
    starts_q = starts_q if padded_q is None else padded_q
    starts_kv = starts_kv if padded_kv is None else padded_kv
    gaps = spec.tensor_format == "thd" and not (padded[0] is None and padded[1] is None)
    if gaps and before is None:
        # Padding after a sequence may exceed the table; the sequences themselves must not.
        real_kv = bounds[0] if bounds[1] is None and shares_lengths else bounds[1]
        for table, real in zip(angles, (bounds[0], real_kv), strict=True):
            demand(reaches_lengths, (real,), table.shape[0])
    if starts_kv is None and shares_lengths:
        starts_kv = starts_q
    if gaps or before is not None:
        spec = spec._replace(clamps=True)
    return Rotation(angles, spec, before, (starts_q, starts_kv))
