"""Computation under Explicit mesh axes, which this package treats as Auto axes.

With Explicit axes, the default of `jax.make_mesh`, an array's sharding is part of its type. JAX then rejects a product
whose contracted axes are sharded, such as a weight gradient. Over Auto axes, XLA chooses the sharding of the product
and inserts the sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
from jax import Array
from jax.sharding import AxisType, PartitionSpec

Params = ParamSpec("Params")
Result = TypeVar("Result")
Entry = str | tuple[str, ...] | None


def explicit_axes() -> tuple[str, ...]:
    """The Explicit axes in the current mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind is AxisType.Explicit)


def explicit_entries(x: Array) -> tuple[Entry, ...]:
    """Explicit mesh axes over which each array axis is sharded."""
    return tuple(jax.typeof(x).sharding.spec)


def with_automatic_axes(function: Callable[..., Any], *args: Any, out: Callable[[], Any]) -> Any:
    """Call a pytree function with all mesh axes automatic.

    Args:
        function: The function.
        *args: Its arguments.
        out: Computes the specs of the results over Explicit axes, a pytree; called only if the mesh has such axes.
    """
    axes = explicit_axes()
    if not axes:
        return function(*args)
    return jax.sharding.auto_axes(function, axes=axes, out_sharding=out())(*args)


def replicating_results(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """Decorate a function to run with all mesh axes automatic and to replicate its results over Explicit axes."""

    @functools.wraps(function)
    def call(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        if not explicit_axes():
            return function(*args, **kwargs)
        leaves, structure = jax.tree.flatten((args, kwargs))

        def compute(*arrays: Array) -> Result:
            remaining = iter(arrays)
            full = [next(remaining) if isinstance(leaf, Array) else leaf for leaf in leaves]
            positional, named = jax.tree.unflatten(structure, full)
            return function(*positional, **named)  # pyright: ignore[reportCallIssue]

        arrays = (leaf for leaf in leaves if isinstance(leaf, Array))
        return with_automatic_axes(compute, *arrays, out=PartitionSpec)

    return call


def unique_axes(entries: Sequence[Entry]) -> PartitionSpec:
    """Spec in which each mesh axis occurs once, at its first entry."""
    visited: set[str] = set()
    spec: list[Entry] = []
    for entry in entries:
        names = tuple(
            name for name in (entry if isinstance(entry, tuple) else (entry,)) if name is not None
        )
        new = tuple(name for name in names if name not in visited)
        visited.update(new)
        spec.append(new if len(new) > 1 else new[0] if new else None)
    return PartitionSpec(*spec)
