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
class SeveralAxes(Kernel):
    """kernel, on arrays that have counts[factor] axes in the place of one.

    counts   (factor of the kernel's rule, how many axes it stands for); a factor that shares its axis has one
    """

    kernel: Kernel
    counts: tuple[tuple[str, int], ...]

    @property
    def rule(self) -> str:
        inner = Rule.of(self.kernel.rule)
        operands, results = (
            ", ".join(" ".join(self._axes(axes)) for axes in side) for side in (inner.operands, inner.results)
        )
        return f"{operands} -> {results}"

    def _axes(self, axes: tuple[Factors, ...]) -> Iterator[str]:
        for factor, *others in axes:
            if others:
                yield f"({' '.join((factor, *others))})"
            else:
                yield from self._names(factor)

    def _names(self, factor: str) -> list[str]:
        count = self._count(factor)
        return [factor] if count == 1 else [f"{factor}_{place}" for place in range(count)]

    def _count(self, factor: str) -> int:
        return dict(self.counts).get(factor, 1)

    @property
    def sizes(self) -> dict[str, int]:
        return self.kernel.sizes

    @property
    def replicated(self) -> tuple[str, ...]:
        return tuple(name for factor in self.kernel.replicated for name in self._names(factor))

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
        """The kernel's shapes of results, with the axes that factors of the operands have."""
        rule = Rule.of(self.kernel.rule)
        found: dict[str, tuple[int, ...]] = {}
        for axes, x in zip(rule.operands, arrays, strict=True):
            extents = iter(x.shape)
            for factor, *_ in axes:
                found[factor] = tuple(next(extents) for _ in range(self._count(factor)))
        for axes, shape in zip(rule.results, shapes, strict=True):
            yield tuple(
                extent
                for (factor, *_), size in zip(axes, shape, strict=True)
                for extent in (found[factor] if self._count(factor) > 1 else (size,))
            )


@dataclass(frozen=True)
class OverVmap(Kernel):
    """A kernel of plain operations where arrays that are mapped have one axis more in front, as results do."""

    kernel: Kernel
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

    @property
    def led_by_results(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.kernel.led_by_results

    @property
    def summed(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.kernel.summed

    @property
    def in_parts(self) -> Kernel:
        return replace(self, kernel=self.kernel.in_parts)

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
    """The kernel's results of arrays that have counts[factor] axes in the place of one, see `kernels.call`."""
    several = tuple((factor, count) for factor, count in counts.items() if count > 1)
    return call(SeveralAxes(kernel, several) if several else kernel, *arrays)
