"""The manual axes of shard_map that arrays vary over, as far as it keeps count, and arrays that vary alike."""

from __future__ import annotations

from typing import Any

import jax


def varying_alike(*arrays: Any) -> Any:
    """The arrays (trees of them), each of which varies over every manual axis that one of them varies over.

    In shard_map, by its default check_vma, a gradient has to vary over the axes that its argument does. A rule of ours
    answers each device's part, also of a parameter that all devices share; JAX adds the parts of one that was cast.
    """
    axes = varies_over(arrays)
    return vary_over(axes, arrays) if axes else arrays


def vary_over(axes: frozenset[str], arrays: Any) -> Any:
    """The arrays (a tree), each of which varies over these manual axes."""

    def cast(leaf: Any) -> Any:
        missing = tuple(sorted(axes - varies_over(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, arrays)


def varies_over(arrays: Any) -> frozenset[str]:
    """The manual axes over which one of these arrays (a tree) varies, as far as shard_map keeps count."""
    return frozenset[str]().union(*(manual_axes(jax.typeof(leaf)) for leaf in jax.tree.leaves(arrays)))


def manual_axes(aval: Any) -> frozenset[str]:
    """The manual axes over which an array of this type varies."""
    kind = getattr(aval, "manual_axis_type", None)  # its name from jax 0.10.2 on; before 0.12 some say vma
    return getattr(aval, "vma", frozenset()) if kind is None else kind.varying
