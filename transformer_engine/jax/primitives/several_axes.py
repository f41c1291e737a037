"""Matrix kernels on arrays whose rows and columns are several axes each.

An axis with 2 f elements that merges the axes [2, f] cannot be sharded if f is: each device would hold two pieces, and
the partitioner would gather the full axis. Axes therefore stay separate between kernels, and each device makes matrices
from its own part, which moves no data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
from jax import Array

from .kernels import Kernel, call
from .partitioning import ParsedRule, ShardingRule


@dataclass(frozen=True)
class _WrappedKernel(Kernel):
    """Base class for kernels that run another kernel on arrays of other shapes; the result order is the same."""

    kernel: Kernel

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def in_parts(self) -> Kernel:
        return replace(self, kernel=self.kernel.in_parts)


@dataclass(frozen=True)
class SeveralAxes(_WrappedKernel):
    """A kernel on arrays that have several axes where the inner kernel has one.

    Attributes:
        ahead: Pairs (factor in the kernel's rule, extents of its axes before the last). Blocks within a
            factor are along its last axis.
    """

    ahead: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def rule(self) -> ShardingRule:
        inner, ahead = self.kernel.rule, dict(self.ahead)

        def names(factor: str) -> list[str]:
            count = 1 + len(ahead.get(factor, ()))
            return [factor] if count == 1 else [f"{factor}_{index}" for index in range(count)]

        sides = []
        for side in ParsedRule.of(inner.text):
            arrays = []
            for axes in side:
                outputs = []
                for factor, *rest in axes:
                    *first, last = names(factor)
                    outputs += [*first, f"({' '.join((last, *rest))})" if rest else last]
                arrays.append(" ".join(outputs))
            sides.append(", ".join(arrays))
        return replace(
            inner,
            text=" -> ".join(sides),
            replicated=tuple(name for factor in inner.replicated for name in names(factor)),
            sizes={
                names(name)[-1]: size // prod(ahead.get(name, ()))
                for name, size in inner.sizes.items()
            },
        )

    def vmap_kernel(self, mapped: Sequence[bool]) -> tuple[Kernel, tuple[bool, ...]] | None:
        vmapped = self.kernel.vmap_kernel(mapped)
        return None if vmapped is None else (OverVmap(self, tuple(mapped)), vmapped[1])

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        merged = (jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in self._merge_axes(operands))
        descriptions = self.kernel.results(*merged)
        shapes = self._split([description.shape for description in descriptions], operands)
        return tuple(
            jax.ShapeDtypeStruct(shape, description.dtype)
            for shape, description in zip(shapes, descriptions, strict=True)
        )

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        results = self.kernel.run(*(x.reshape(shape) for shape, x in self._merge_axes(arrays)))
        shapes = self._split([result.shape for result in results], arrays)
        return tuple(result.reshape(shape) for shape, result in zip(shapes, results, strict=True))

    def _merge_axes(self, arrays: Sequence[Any]) -> Iterator[tuple[tuple[int, ...], Any]]:
        """Yield the shape of each array for the inner kernel, and the array."""
        ahead = dict(self.ahead)
        for axes, x in zip(ParsedRule.of(self.kernel.rule.text).operands, arrays, strict=True):
            extents = iter(x.shape)
            counts = (1 + len(ahead.get(factor, ())) for factor, *_ in axes)
            yield tuple(prod(next(extents) for _ in range(count)) for count in counts), x

    def _split(
        self, shapes: Sequence[tuple[int, ...]], arrays: Sequence[Any]
    ) -> Iterator[tuple[int, ...]]:
        """Expand the inner kernel's result shapes to the several axes that the factors have in these operands."""
        rule = ParsedRule.of(self.kernel.rule.text)
        ahead = _leading_extents(
            rule, {factor: 1 + len(extents) for factor, extents in self.ahead}, arrays
        )
        return (
            _with_axes(axes, shape, ahead) for axes, shape in zip(rule.results, shapes, strict=True)
        )


def _leading_extents(
    rule: ParsedRule, counts: Mapping[str, int], arrays: Sequence[Any]
) -> dict[str, tuple[int, ...]]:
    """Extents before the last axis, for each factor that has several axes."""
    mapped_sizes: dict[str, tuple[int, ...]] = {}
    for axes, x in zip(rule.operands, arrays, strict=True):
        extents = iter(x.shape)
        if len(axes) == x.ndim:  # one axis each
            continue
        for factor, *_ in axes:
            *first, _ = (next(extents) for _ in range(counts.get(factor, 1)))
            mapped_sizes[factor] = tuple(first)
    return {factor: mapped_sizes[factor] for factor in counts if factor in mapped_sizes}


def _with_axes(
    axes: tuple[tuple[str, ...], ...], shape: tuple[int, ...], ahead: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...]:
    """Expand the shape of an array with one axis per factor to each factor's several axes."""
    return tuple(
        extent
        for (factor, *_), size in zip(axes, shape, strict=True)
        for first in (ahead.get(factor, ()),)
        for extent in (*first, size // prod(first))
    )


@dataclass(frozen=True)
class OverVmap(_WrappedKernel):
    """A kernel under vmap, built from plain JAX operations: mapped operands and all results have a first batch axis."""

    mapped: tuple[bool, ...]

    @property
    def rule(self) -> ShardingRule:
        inner = self.kernel.rule
        operands, results = (side.split(",") for side in inner.text.split("->"))
        name = "v"
        while name in ParsedRule.of(inner.text).factors:
            name += "v"
        mapped = (
            f"{name} " * is_mapped + operand
            for operand, is_mapped in zip(operands, self.mapped, strict=True)
        )
        return replace(
            inner,
            text=f"{', '.join(mapped)} -> {', '.join(f'{name} {operand}' for operand in results)}",
        )

    def vmap_kernel(self, mapped: Sequence[bool]) -> tuple[Kernel, tuple[bool, ...]]:
        return OverVmap(self, tuple(mapped)), (True,) * len(ParsedRule.of(self.rule.text).results)

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        (size,) = {
            x.shape[0] for x, is_mapped in zip(operands, self.mapped, strict=True) if is_mapped
        }
        descriptions = self.kernel.results(
            *(
                jax.ShapeDtypeStruct(x.shape[is_mapped:], x.dtype)
                for x, is_mapped in zip(operands, self.mapped, strict=True)
            )
        )
        return tuple(
            jax.ShapeDtypeStruct((size, *description.shape), description.dtype)
            for description in descriptions
        )

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        axes = tuple(0 if is_mapped else None for is_mapped in self.mapped)
        return jax.vmap(self.kernel.run, in_axes=axes)(*arrays)


class OperationsKernel(Kernel):
    """Base class for kernels from plain JAX operations with one result.

    They are kernels for the partitioner only: devices exchange the operands, not values that are computed from them.
    """

    def vmap_kernel(self, mapped: Sequence[bool]) -> tuple[Kernel, tuple[bool, ...]]:
        return OverVmap(self, tuple(mapped)), (True,)


def with_rows(x: Array, trailing: int) -> tuple[Array, int]:
    """Add a row axis if x has only `trailing` axes; also return the number of row axes."""
    x = x if x.ndim > trailing else x[None]
    return x, x.ndim - trailing


def call_on_axes(kernel: Kernel, counts: Mapping[str, int], *arrays: Array) -> tuple[Array, ...]:
    """Call a kernel on arrays that have counts[factor] axes where it expects one; see `kernels.call`.

    An array may still have one axis per factor. So have the results where the last of several axes contains a partial
    block, or one block only.
    """
    outer = kernel.rule
    rule = ParsedRule.of(outer.text)
    counts = {factor: count for factor, count in counts.items() if count > 1}
    ahead = _leading_extents(rule, counts, arrays)
    for factor in [factor for factor in ahead if factor in outer.sizes]:
        blocks, rest = divmod(outer.sizes[factor], prod(ahead[factor]))
        if rest or blocks == 1:  # Shardy rejects a one-element factor next to another
            # Merge the axes of one factor.
            results = []
            for axes, x in zip(rule.operands, arrays, strict=True):
                if len(axes) != x.ndim:
                    extents, shape = iter(x.shape), []
                    for name, *_ in axes:
                        sizes = [next(extents) for _ in range(counts.get(name, 1))]
                        shape += [prod(sizes)] if name == factor else sizes
                    x = x.reshape(shape)
                results.append(x)
            arrays = tuple(results)
            del ahead[factor]
            counts = {name: count for name, count in counts.items() if name != factor}
    if not ahead:
        return call(kernel, *arrays)
    several = (
        x.reshape(_with_axes(axes, x.shape, ahead)) if len(axes) == x.ndim else x
        for axes, x in zip(rule.operands, arrays, strict=True)
    )
    return call(SeveralAxes(kernel, tuple(ahead.items())), *several)
