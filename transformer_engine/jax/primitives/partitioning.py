"""How devices share the operands and results of a kernel.

A Shardy rule names every axis's factors: "r (k b) -> k r". An axis with k * b elements is sharded between
blocks of b, over the mesh axes that shard k. Shardy follows the rule as far as it can; `placement` enforces it on
operands and results.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Axes = tuple[str, ...]


Factors = tuple[str, ...]


class Extent(NamedTuple):
    """One matrix axis in rules.

    Attributes:
        whole: Factors for the element axis.
        blocks: Factors for the block axis.
        bytes: Factors for the byte axis, where a byte holds two elements.
        sizes: Factor sizes within blocks, and sizes of the factors that count them.
        replicated: Factors that are not sharded.
    """

    whole: str
    blocks: str
    bytes: str
    sizes: dict[str, int]
    replicated: tuple[str, ...]


def extent(name: str, size: int, block: int) -> Extent:
    """Build an axis that may be sharded between blocks; not sharded if its last block is partial or its only block."""
    if block == 1:
        return Extent(name, name, name, {}, ())
    inner, half = f"{name}in", f"{name}half"
    if size % block or size == block:  # Shardy rejects a one-element factor next to another
        return Extent(name, inner, half, {}, (name, inner, half))
    sizes = {name: size // block, inner: block, half: block // 2}
    return Extent(f"({name} {inner})", name, f"({name} {half})", sizes, ())


@dataclass(frozen=True)
class ShardingRule:
    """How devices share the arrays of a kernel.

    Attributes:
        text: Axis factors for operands and results, as Shardy writes them: "r w, w -> r w".
        replicated: Factors that are not sharded.
        sizes: Sizes for the factors that share an axis with another factor.
        led_by_results: Whether the shardings of the results decide if a mesh axis shards operands differently.
        summed: Indices of results to which each device contributes a summand.
        maxed: Indices of results to which each device contributes a candidate for the maximum.
    """

    text: str
    replicated: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    led_by_results: bool = False
    summed: tuple[int, ...] = ()
    maxed: tuple[int, ...] = ()

    @classmethod
    def from_extents(
        cls, text: str, *extents: Extent, whole: Sequence[str] = (), **options: Any
    ) -> ShardingRule:
        """Build a rule whose text contains the factors of extents; the factors `whole` are not sharded either."""
        words = text.replace(",", " ").split()
        partial = (name for extent in extents for name in extent.replicated if name in words)
        sizes = {name: size for extent in extents for name, size in extent.sizes.items()}
        return cls(text, (*whole, *partial), sizes, **options)


class ParsedRule(NamedTuple):
    """The factors of every operand and result axis."""

    operands: tuple[tuple[Factors, ...], ...]
    results: tuple[tuple[Factors, ...], ...]

    @classmethod
    def of(cls, text: str) -> ParsedRule:
        """Parse a rule: the array "r (k b)" has the axes (("r",), ("k", "b"))."""
        return cls(
            *(
                tuple(
                    tuple(
                        tuple(axis.split())
                        for groups in re.findall(r"\(([^)]*)\)|(\S+)", array)
                        for axis in groups
                        if axis
                    )
                    for array in side.split(",")
                )
                for side in text.split("->")
            )
        )

    @property
    def factors(self) -> tuple[str, ...]:
        """All factors in order of first occurrence."""
        arrays = (*self.operands, *self.results)
        return tuple(dict.fromkeys(factor for array in arrays for axis in array for factor in axis))


def unknown_sizes(text: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """Get sizes for a rule's factors that are not the only factor on any axis."""
    rule = ParsedRule.of(text)
    axes = [axis for array in (*rule.operands, *rule.results) for axis in array]
    factors = {factor for axis in axes if len(axis) == 1 for factor in axis}
    return {name: sizes[name] for axis in axes for name in axis if name not in factors}


def order_factors(text: str, factors: Sequence[str]) -> tuple[str, ...]:
    """Sort factors into a rule's order, which Shardy requires for replicated factors."""
    return tuple(factor for factor in ParsedRule.of(text).factors if factor in factors)


def broadcast_factors(name: str, shape: Sequence[int], full: Sequence[tuple[str, int]]) -> str:
    """Factors for an array that broadcasts to the axes `full`, (factor, extent) pairs.

    A one-element axis that broadcasts has a separate factor, whose name begins with `name`. The other axes are sharded
    as those that the array broadcasts to.
    """
    return " ".join(
        factor if size == extent else f"{name}{index}"
        for index, ((factor, extent), size) in enumerate(zip(full, shape, strict=True))
    )


def strides_over_scores(array: Any | None) -> tuple[int, int, int, int]:
    """Strides over [b, h, q, k] for a contiguous array: 0 for one-element axes, and for a missing array."""
    if array is None:
        return 0, 0, 0, 0
    shape = array.shape
    return tuple(0 if n == 1 else prod(shape[index + 1 :]) for index, n in enumerate(shape))  # pyright: ignore


@dataclass(frozen=True)
class Placement:
    """Shardings for a kernel's arrays.

    Attributes:
        operands: Sharding for each operand.
        results: Sharding for each result; results that devices compute in parts are replicated.
        reduced: For each result, the mesh axes over which devices compute parts.
    """

    operands: tuple[NamedSharding, ...]
    results: tuple[NamedSharding, ...]
    reduced: tuple[Axes, ...]


class _Proposal(NamedTuple):
    """The mesh axes that would shard an array axis whose first factor is `factor`; extent: axis size."""

    factor: str
    extent: int
    axes: Axes


def placement(
    rule: ShardingRule, mesh: Mesh, operands: Sequence[Any], results: Sequence[Any] = ()
) -> Placement:
    """Place operands, whose shardings Shardy proposes, and results by a rule.

    Args:
        rule: Rule of the kernel.
        mesh: Mesh of the program.
        operands: Operands with their proposed shardings.
        results: Results with their proposed shardings, which are read if rule.led_by_results. Then a mesh axis that
            would shard several factors shards those that operands contract and agree on; otherwise what the results
            propose; otherwise what the first operand proposes.

    Returns:
        Shardings for all arrays.
    """
    parsed = ParsedRule.of(rule.text)
    cuts: dict[str, Axes] = dict.fromkeys(rule.replicated, ())
    proposed = [*_proposals(parsed.operands, operands)]
    if rule.led_by_results and results:
        retained = {factor for axes in parsed.results for factor, *_ in axes}
        axes_by_name: dict[str, list[Axes]] = {}
        for factor, _, axes in proposed:
            axes_by_name.setdefault(factor, []).append(axes)
        agreed = {
            name
            for name, factor_axes in axes_by_name.items()
            if name not in retained and len(factor_axes) > 1 == len(set(factor_axes))
        }
        first = [proposal for proposal in proposed if proposal.factor in agreed]
        proposed = [*first, *_proposals(parsed.results, results), *proposed]
    for factor, extent, axes in proposed:
        parts = prod(mesh.shape[axis] for axis in axes)
        free = not any(set(axes) & set(other_axes) for other_axes in cuts.values())
        if axes and free and factor not in cuts and rule.sizes.get(factor, extent) % parts == 0:
            cuts[factor] = axes
    used = {axis for axes in cuts.values() for axis in axes}
    of_operands, of_results = (
        tuple(
            NamedSharding(mesh, PartitionSpec(*(cuts.get(axis[0], ()) or None for axis in factors)))
            for factors in side
        )
        for side in parsed
    )
    reduced = tuple(
        tuple(sorted(used - {name for axis in factors for name in cuts.get(axis[0], ())}))
        for factors in parsed.results
    )
    return Placement(of_operands, of_results, reduced)


def _proposals(rule: Sequence[tuple[Factors, ...]], arrays: Sequence[Any]) -> Iterator[_Proposal]:
    """Yield the proposals from one side of a rule, axis by axis."""
    for factors, array in zip(rule, arrays, strict=True):
        spec = [*getattr(array.sharding, "spec", ()), *[None] * len(factors)]
        for (factor, *_), extent, part in zip(factors, array.shape, spec, strict=False):
            axes = () if part is None else part if isinstance(part, tuple) else (part,)
            yield _Proposal(factor, extent, axes)


def named(mesh: Mesh, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Arrays that the partitioner proposes, with shardings by mesh axis names if it has any.

    Shardy may shard an axis over part of a mesh axis, such as 4 blocks over 2 of its 8 devices. JAX has no name for
    this and raises. Here such an axis is replicated, so that devices exchange it.
    """
    if mesh.empty:
        return tuple(arrays)
    return tuple(
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, _spec(mesh, x)))
        for x in arrays
    )


def _spec(mesh: Mesh, array: Any) -> PartitionSpec:
    """Express an array's sharding by mesh axis names; axes sharded over part of a mesh axis are replicated."""
    sharding = array.sharding._to_xla_hlo_sharding(len(array.shape))
    if not sharding.is_tiled():
        return PartitionSpec()
    tiles = sharding.tile_assignment_dimensions()
    devices = np.asarray(sharding.tile_assignment_devices())
    # For every device in the mesh, the index of its tile along each array axis.
    places = np.empty((mesh.size, len(tiles)), np.int64)
    places[devices] = np.stack(np.unravel_index(np.arange(mesh.size), tiles), axis=1)
    places = places.reshape(*mesh.devices.shape, len(tiles))
    return PartitionSpec(
        *(
            _sharding_axes(mesh, places[..., axis], tiles[axis]) or None
            for axis in range(len(array.shape))
        )
    )


def _sharding_axes(mesh: Mesh, places: np.ndarray, tiles: int) -> Axes:
    """Mesh axes along which the tile indices [*mesh] differ; none if only part of an axis shards them."""
    steps = {
        name: int(np.ptp(places, axis=axis).max())
        for axis, name in enumerate(mesh.axis_names)
        if tiles > 1
    }
    order = tuple(sorted((name for name in steps if steps[name]), key=lambda name: -steps[name]))
    return order if prod(mesh.shape[name] for name in order) == tiles else ()


def find_mesh(operands: Sequence[Any], within_shard_map: bool) -> Mesh:
    """Find the operands' mesh; if there is none, a mesh over all their devices that shards nothing.

    Args:
        operands: Operands with shardings.
        within_shard_map: Whether the kernel is called inside `shard_map`. JAX does not name the axes that it leaves to
            XLA there, so no warning is given.
    """
    for operand in operands:
        if isinstance(operand.sharding, NamedSharding) and isinstance(operand.sharding.mesh, Mesh):
            return operand.sharding.mesh
    if not within_shard_map:
        warn_of_no_mesh()
    devices = sorted(operands[0].sharding.device_set, key=lambda device: device.id)
    return Mesh(np.asarray(devices), ("device",))


@functools.cache
def warn_of_no_mesh() -> None:
    """Warn once per process about a program over several devices without a mesh.

    The cache is necessary: JAX enters warning filters while it compiles, which reset Python's warning registry.
    """
    warnings.warn(
        "a program over several devices was compiled without a mesh in force: every device computes the whole of its "
        "kernels; enter the mesh with jax.set_mesh(mesh), or `with mesh:`",
        stacklevel=3,
    )
