"""A kernel of matrices on arrays whose rows and columns are several axes each.

An axis of 2 f elements made of [2, f] cannot be cut where devices hold parts of f: each holds two pieces of it, and
the partitioner would gather the whole. So axes stay apart between kernels, and each device makes the matrices of its
own part, which moves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
from jax import Array

from .kernels import Kernel, call
from .partitioning import Factors, Rule


@dataclass(frozen=True)
class _OfAnother(Kernel):
    """What a kernel on other arrays has of the kernel that it runs, as results of both follow each other alike."""

    kernel: Kernel

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def led_by_results(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.kernel.led_by_results

    @property
    def summed(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.kernel.summed

    @property
    def maxed(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.kernel.maxed

    @property
    def in_parts(self) -> Kernel:
        return replace(self, kernel=self.kernel.in_parts)


@dataclass(frozen=True)
class SeveralAxes(_OfAnother):
    """kernel, on arrays that have several axes in the place of one.

    ahead   (factor of the kernel's rule, the extents of the axes in front of its last one), of which blocks lie along
            the last
    """

    ahead: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def rule(self) -> str:
        inner = Rule.of(self.kernel.rule)
        operands, results = (
            ", ".join(" ".join(self._axes(axes)) for axes in side) for side in (inner.operands, inner.results)
        )
        return f"{operands} -> {results}"

    def _axes(self, axes: tuple[Factors, ...]) -> Iterator[str]:
        for factor, *others in axes:
            *first, last = self._names(factor)
            yield from first
            yield f"({' '.join((last, *others))})" if others else last

    def _names(self, factor: str) -> list[str]:
        count = self._count(factor)
        return [factor] if count == 1 else [f"{factor}_{place}" for place in range(count)]

    def _count(self, factor: str) -> int:
        return 1 + len(dict(self.ahead).get(factor, ()))

    @property
    def sizes(self) -> dict[str, int]:
        sizes, ahead = self.kernel.sizes, dict(self.ahead)
        return {self._names(name)[-1]: size // prod(ahead.get(name, ())) for name, size in sizes.items()}

    @property
    def replicated(self) -> tuple[str, ...]:
        return tuple(name for factor in self.kernel.replicated for name in self._names(factor))

    def under_vmap(self, mapped: Sequence[bool]) -> tuple[Kernel, tuple[bool, ...]] | None:
        of_all = self.kernel.under_vmap(mapped)
        return None if of_all is None else (OverVmap(self, tuple(mapped)), of_all[1])

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        merged = (jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in self._merged(operands))
        made = self.kernel.results(*merged)
        shapes = self._split([one.shape for one in made], operands)
        return tuple(jax.ShapeDtypeStruct(shape, one.dtype) for shape, one in zip(shapes, made, strict=True))

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        made = self.kernel.run(*(x.reshape(shape) for shape, x in self._merged(arrays)))
        shapes = self._split([one.shape for one in made], arrays)
        return tuple(one.reshape(shape) for shape, one in zip(shapes, made, strict=True))

    def _merged(self, arrays: Sequence[Any]) -> Iterator[tuple[tuple[int, ...], Any]]:
        """The shape that the kernel knows of each array, and the array."""
        for axes, x in zip(Rule.of(self.kernel.rule).operands, arrays, strict=True):
            extents = iter(x.shape)
            yield tuple(prod(next(extents) for _ in range(self._count(factors[0]))) for factors in axes), x

    def _split(self, shapes: Sequence[tuple[int, ...]], arrays: Sequence[Any]) -> Iterator[tuple[int, ...]]:
        """The kernel's shapes of results, with the axes that factors have in these operands."""
        rule = Rule.of(self.kernel.rule)
        ahead = _ahead(rule, {factor: self._count(factor) for factor, _ in self.ahead}, arrays)
        return (_with_axes(axes, shape, ahead) for axes, shape in zip(rule.results, shapes, strict=True))


def _ahead(rule: Rule, counts: dict[str, int], arrays: Sequence[Any]) -> dict[str, tuple[int, ...]]:
    """What stands in front of the last axis of each factor that several stand for."""
    found: dict[str, tuple[int, ...]] = {}
    for axes, x in zip(rule.operands, arrays, strict=True):
        extents = iter(x.shape)
        if len(axes) == x.ndim:  # in one axis each
            continue
        for factor, *_ in axes:
            *first, _ = (next(extents) for _ in range(counts.get(factor, 1)))
            found[factor] = tuple(first)
    return {factor: found[factor] for factor in counts if factor in found}


def _with_axes(
    axes: tuple[Factors, ...], shape: tuple[int, ...], ahead: dict[str, tuple[int, ...]]
) -> tuple[int, ...]:
    """The shape of an array of one axis a factor, with those that stand for it."""
    return tuple(
        extent
        for (factor, *_), size in zip(axes, shape, strict=True)
        for first in (ahead.get(factor, ()),)
        for extent in (*first, size // prod(first))
    )


@dataclass(frozen=True)
class OverVmap(_OfAnother):
    """A kernel of plain operations where arrays that are mapped have one axis more in front, as results do."""

    mapped: tuple[bool, ...]

    @property
    def rule(self) -> str:
        operands, results = (side.split(",") for side in self.kernel.rule.split("->"))
        name = "v"
        while name in Rule.of(self.kernel.rule).factors:
            name += "v"
        mapped = (f"{name} " * is_mapped + one for one, is_mapped in zip(operands, self.mapped, strict=True))
        return f"{', '.join(mapped)} -> {', '.join(f'{name} {one}' for one in results)}"

    @property
    def replicated(self) -> tuple[str, ...]:
        return self.kernel.replicated

    @property
    def sizes(self) -> dict[str, int]:
        return self.kernel.sizes

    def under_vmap(self, mapped: Sequence[bool]) -> tuple[Kernel, tuple[bool, ...]]:
        return OverVmap(self, tuple(mapped)), (True,) * len(Rule.of(self.rule).results)

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        (size,) = {x.shape[0] for x, is_mapped in zip(operands, self.mapped, strict=True) if is_mapped}
        made = self.kernel.results(
            *(
                jax.ShapeDtypeStruct(x.shape[is_mapped:], x.dtype)
                for x, is_mapped in zip(operands, self.mapped, strict=True)
            )
        )
        return tuple(jax.ShapeDtypeStruct((size, *one.shape), one.dtype) for one in made)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        axes = tuple(0 if is_mapped else None for is_mapped in self.mapped)
        return jax.vmap(self.kernel.run, in_axes=axes)(*arrays)


def with_rows(x: Array, others: int) -> tuple[Array, int]:
    """x [*rows, ..] with `others` axes behind its rows, and the number of rows' axes, at least one."""
    x = x if x.ndim > others else x[None]
    return x, x.ndim - others


def call_on_axes(kernel: Kernel, counts: dict[str, int], *arrays: Array) -> tuple[Array, ...]:
    """The kernel's results of arrays that have counts[factor] axes in the place of one, see `kernels.call`.

    An array may have one axis each all the same. So have results where the last of several axes holds no blocks, or
    none but a single one.
    """
    rule = Rule.of(kernel.rule)
    counts = {factor: count for factor, count in counts.items() if count > 1}
    ahead = _ahead(rule, counts, arrays)
    for factor in [factor for factor in ahead if factor in kernel.sizes]:
        blocks, rest = divmod(kernel.sizes[factor], prod(ahead[factor]))
        if rest or blocks == 1:  # Shardy refuses a factor of one element beside another
            arrays = _in_one(rule, factor, counts, arrays)
            del ahead[factor]
            counts = {name: count for name, count in counts.items() if name != factor}
    if not ahead:
        return call(kernel, *arrays)
    laid = (
        x.reshape(_with_axes(axes, x.shape, ahead)) if len(axes) == x.ndim else x
        for axes, x in zip(rule.operands, arrays, strict=True)
    )
    return call(SeveralAxes(kernel, tuple(ahead.items())), *laid)


def _in_one(rule: Rule, factor: str, counts: dict[str, int], arrays: Sequence[Array]) -> tuple[Array, ...]:
    """The arrays with the axes that stand for a factor made one."""
    made = []
    for axes, x in zip(rule.operands, arrays, strict=True):
        if len(axes) != x.ndim:
            extents, shape = iter(x.shape), []
            for name, *_ in axes:
                own = [next(extents) for _ in range(counts.get(name, 1))]
                shape += [prod(own)] if name == factor else own
            x = x.reshape(shape)
        made.append(x)
    return tuple(made)
