"""Manual shard_map axes that arrays vary over, and casts to varying arrays."""

from __future__ import annotations

from typing import Any

import jax


def align_manual_axes(*arrays: Any) -> Any:
    """Cast array pytrees to vary over every manual axis that one of them varies over.

    In shard_map with check_vma, its default, a gradient must vary over the axes of its argument. Derivative rules in
    this package return each device's part, even for a parameter that all devices share; JAX adds the parts of a
    parameter that was cast.
    """
    axes = varying_axes(arrays)
    return cast_varying(axes, arrays) if axes else arrays


def cast_varying(axes: frozenset[str], arrays: Any) -> Any:
    """Cast an array pytree to vary over these manual axes."""

    def cast(leaf: Any) -> Any:
        missing = tuple(sorted(axes - varying_axes(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, arrays)


def varying_axes(arrays: Any) -> frozenset[str]:
    """Manual axes over which an array in a pytree varies, if shard_map tracks them (check_vma)."""
    return frozenset[str]().union(
        *(manual_axes(jax.typeof(leaf)) for leaf in jax.tree.leaves(arrays))
    )


def manual_axes(aval: Any) -> frozenset[str]:
    """Manual axes over which an array with this type varies."""
    # its name from jax 0.10.2 on; some versions before 0.12 have vma
    kind = getattr(aval, "manual_axis_type", None)
    return getattr(aval, "vma", frozenset()) if kind is None else kind.varying
