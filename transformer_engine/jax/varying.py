"""Arguments of one operation within shard_map, where some vary over its mesh axes and others are the same everywhere.

JAX follows which is which (`check_vma=True`) and asks of a rule of differentiation that a gradient vary as its argument
does: the gradient of parameters that all devices share is a sum over them. It is, where a parameter is first made to
vary: the transpose of that is the sum. A state is no sum, and merges as in `fan_out`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
from jax import lax

from .quantize.sharing import merged_over

Values = TypeVar("Values")
States = TypeVar("States")


def vary_alike(values: Values, states: States = None) -> tuple[Values, States]:
    """Both, every array varying over all axes that any of them varies over; without shard_map as they are.

    values   a pytree of arrays
    states   one of quantizers or quantizer sets
    """
    axes: frozenset[str] = frozenset().union(*(_axes(leaf) for leaf in jax.tree.leaves((values, states))))
    if not axes:
        return values, states
    return jax.tree.map(lambda leaf: _over(axes, leaf), values), _states_over(axes, states)


def _states_over(axes: frozenset[str], states: Any) -> Any:
    """The states of devices: their gradients, the next states, merge over the axes that were the same for all."""
    if isinstance(states, (tuple, list)):
        return tuple(_states_over(axes, state) for state in states)
    common = axes.difference(*(_axes(leaf) for leaf in jax.tree.leaves(states)))
    return merged_over(jax.tree.map(lambda leaf: _over(axes, leaf), states), tuple(sorted(common)))


def _over(axes: frozenset[str], leaf: Any) -> Any:
    missing = tuple(sorted(axes - _axes(leaf)))
    return lax.pcast(leaf, missing, to="varying") if missing else leaf


def _axes(leaf: Any) -> frozenset[str]:
    """The mesh axes that shard_map says an array varies over."""
    aval: Any = jax.typeof(leaf)
    kind = getattr(aval, "manual_axis_type", None)  # its name from jax 0.10.2 on; before 0.12 some say vma
    return getattr(aval, "vma", frozenset()) if kind is None else kind.varying
