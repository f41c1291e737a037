"""Which axes of a mesh cut a kernel's operands and results, from the rule that Shardy is given.

A rule names the factors of every axis, "r (k b) -> k r": an axis of k * b elements is cut between blocks of b, by what
cuts k. Shardy follows the rule as far as it can; here operands and results are held to it.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Axes = tuple[str, ...]


Factors = tuple[str, ...]


class Rule(NamedTuple):
    """The factors of every axis of the operands and of the results."""

    operands: tuple[tuple[Factors, ...], ...]
    results: tuple[tuple[Factors, ...], ...]

    @classmethod
    def of(cls, text: str) -> Rule:
        operands, results = (side.split(",") for side in text.split("->"))
        return cls(*(tuple(_axes(array) for array in side) for side in (operands, results)))

    @property
    def factors(self) -> tuple[str, ...]:
        """All of them, as they follow each other."""
        arrays = (*self.operands, *self.results)
        return tuple(dict.fromkeys(factor for array in arrays for axis in array for factor in axis))


def _axes(array: str) -> tuple[Factors, ...]:
    """ "r (k b)" -> (("r",), ("k", "b"))"""
    return tuple(
        tuple(one.split()) for found in re.findall(r"\(([^)]*)\)|(\S+)", array) for one in found if one
    )


def unknown_sizes(text: str, sizes: dict[str, int]) -> dict[str, int]:
    """The sizes of those factors of a rule that no axis tells."""
    rule = Rule.of(text)
    axes = [axis for array in (*rule.operands, *rule.results) for axis in array]
    told = {factor for axis in axes if len(axis) == 1 for factor in axis}
    return {name: sizes[name] for axis in axes for name in axis if name not in told}


def in_order(text: str, factors: Sequence[str]) -> tuple[str, ...]:
    """Factors as they follow each other in a rule, which Shardy demands of those that it is told not to cut."""
    return tuple(factor for factor in Rule.of(text).factors if factor in factors)


def broadcast_factors(name: str, shape: Sequence[int], whole: Sequence[tuple[str, int]]) -> str:
    """The factors of an array that is broadcast to axes `whole`, (factor, extent) each: theirs, and where it has one
    element for all of an axis one of its own, called by its name. Devices cut it as they cut what it is broadcast to.
    """
    return " ".join(
        factor if size == extent else f"{name}{place}"
        for place, ((factor, extent), size) in enumerate(zip(whole, shape, strict=True))
    )


def strides_over_scores(array: Any | None) -> tuple[int, int, int, int]:
    """Strides over [b, h, q, k] of an array as it lies in memory; 0 along an axis that has one element for all, and
    where nothing is given.
    """
    if array is None:
        return 0, 0, 0, 0
    shape = array.shape
    return tuple(0 if n == 1 else prod(shape[place + 1 :]) for place, n in enumerate(shape))  # pyright: ignore


@dataclass(frozen=True)
class Placement:
    """How a kernel's arrays lie on a mesh.

    operands, results   one sharding an array; results that devices make parts of are whole
    reduced             of every result, the axes whose devices make parts of it
    """

    operands: tuple[NamedSharding, ...]
    results: tuple[NamedSharding, ...]
    reduced: tuple[Axes, ...]


def placement(
    text: str,
    sizes: dict[str, int],
    replicated: Sequence[str],
    mesh: Mesh,
    operands: Sequence[Any],
    results: Sequence[Any] = (),
) -> Placement:
    """The placement of operands, whose shardings Shardy proposes, and of results by the rule `text`.

    sizes     of factors that lead an axis of several; replicated: factors that are not cut
    results   with their shardings, of a kernel that they lead. An axis of the mesh that cuts several factors cuts
              what operands are contracted over and agree on; else what the results want; else the first operand's
    """
    rule = Rule.of(text)
    cuts: dict[str, Axes] = dict.fromkeys(replicated, ())
    proposed = [*_proposals(rule.operands, operands)]
    if results:
        first = [one for one in proposed if one.factor in _agreed(rule, proposed)]
        proposed = [*first, *_proposals(rule.results, results), *proposed]
    for factor, extent, axes in proposed:
        parts = prod(mesh.shape[axis] for axis in axes)
        free = not any(set(axes) & set(others) for others in cuts.values())
        if axes and free and factor not in cuts and sizes.get(factor, extent) % parts == 0:
            cuts[factor] = axes
    used = {axis for axes in cuts.values() for axis in axes}

    def laid(factors: tuple[Factors, ...]) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(cuts.get(axis[0], ()) or None for axis in factors)))

    reduced = tuple(
        tuple(sorted(used - {name for axis in factors for name in cuts.get(axis[0], ())}))
        for factors in rule.results
    )
    return Placement(tuple(map(laid, rule.operands)), tuple(map(laid, rule.results)), reduced)


class _Proposal(NamedTuple):
    """The mesh axes that one array would have an axis cut by, whose extent is that of its factors together."""

    factor: str
    extent: int
    axes: Axes


def _proposals(rule: Sequence[tuple[Factors, ...]], arrays: Sequence[Any]) -> Iterator[_Proposal]:
    for factors, array in zip(rule, arrays, strict=True):
        cuts = [*_axes_of(array.sharding), *[()] * len(factors)]
        for (factor, *_), extent, axes in zip(factors, array.shape, cuts, strict=False):
            yield _Proposal(factor, extent, axes)


def _agreed(rule: Rule, proposed: Sequence[_Proposal]) -> set[str]:
    """The contracted factors that several operands have, all cut alike."""
    kept = {factor for axes in rule.results for factor, *_ in axes}
    found: dict[str, list[Axes]] = {}
    for factor, _, axes in proposed:
        found.setdefault(factor, []).append(axes)
    return {name for name, cuts in found.items() if name not in kept and len(cuts) > 1 == len(set(cuts))}


def named(mesh: Mesh, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The arrays that the partitioner proposes, their shardings by the names of the mesh's axes, where it has any.

    Shardy may cut an axis by a part of one of the mesh, as 4 blocks by 2 of its 8 devices: jax finds no name for that
    and raises. It stands as whole here, so that devices exchange it.
    """
    if mesh.empty:
        return tuple(arrays)
    return tuple(
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, _spec(mesh, x))) for x in arrays
    )


def _spec(mesh: Mesh, array: Any) -> PartitionSpec:
    sharding = array.sharding._to_xla_hlo_sharding(len(array.shape))
    if not sharding.is_tiled():
        return PartitionSpec()
    tiles = sharding.tile_assignment_dimensions()
    devices = np.asarray(sharding.tile_assignment_devices())
    # Of every device of the mesh the tile that it holds, along each axis of the array.
    places = np.empty((mesh.size, len(tiles)), np.int64)
    places[devices] = np.stack(np.unravel_index(np.arange(mesh.size), tiles), axis=1)
    places = places.reshape(*mesh.devices.shape, len(tiles))
    return PartitionSpec(
        *(_cuts(mesh, places[..., axis], tiles[axis]) or None for axis in range(len(array.shape)))
    )


def _cuts(mesh: Mesh, places: np.ndarray, tiles: int) -> Axes:
    """The mesh axes along which the places of devices [*mesh] differ; none where a part of one makes the difference."""
    steps = {
        name: int(np.ptp(places, axis=axis).max()) for axis, name in enumerate(mesh.axis_names) if tiles > 1
    }
    found = tuple(sorted((name for name in steps if steps[name]), key=lambda name: -steps[name]))
    return found if prod(mesh.shape[name] for name in found) == tiles else ()


def mesh_of(operands: Sequence[Any], within_shard_map: bool) -> Mesh:
    """The mesh that operands lie on; one of all their devices, without names that cut anything, where none is known.

    within_shard_map   where jax names no axes that it leaves to XLA, and the caller can do nothing about it
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
    """Once a process, of a program over several devices whose mesh nobody names.

    jax enters filters of warnings while it compiles, by which Python forgets what it has said: every kernel would warn.
    """
    warnings.warn(
        "a program over several devices was compiled without a mesh in force: every device computes the whole of its "
        "kernels; enter the mesh by jax.set_mesh(mesh), or `with mesh:`",
        stacklevel=3,
    )


def _axes_of(sharding: Any) -> list[Axes]:
    """The mesh axes that cut each axis of an array."""
    spec = getattr(sharding, "spec", ())
    return [() if part is None else part if isinstance(part, tuple) else (part,) for part in spec]


class Extent(NamedTuple):
    """One axis of a matrix in rules.

    whole, blocks, bytes   its elements, its blocks, its elements two to a byte
    sizes                  of the factors that stand within blocks, and of those that count them
    replicated             factors that are not cut
    """

    whole: str
    blocks: str
    bytes: str
    sizes: dict[str, int]
    replicated: tuple[str, ...]


def extent(name: str, size: int, block: int) -> Extent:
    """An axis that may be cut between blocks; not at all where the last of them is not full, or there is one alone."""
    if block == 1:
        return Extent(name, name, name, {}, ())
    inner, half = f"{name}in", f"{name}half"
    if size % block or size == block:  # Shardy refuses a factor of one element beside another
        return Extent(name, inner, half, {}, (name, inner, half))
    sizes = {name: size // block, inner: block, half: block // 2}
    return Extent(f"({name} {inner})", name, f"({name} {half})", sizes, ())
