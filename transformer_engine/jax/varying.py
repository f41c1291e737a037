"""Arguments of one operation within shard_map, where some vary over its mesh axes and others are the same everywhere.

JAX follows which is which (`check_vma=True`) and asks of a rule of differentiation that a gradient vary as its argument
does: the gradient of parameters that all devices share is a sum over them. It is, where a parameter is first made to
vary: the transpose of that is the sum. A state is no sum, and merges as in `fan_out`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax

from .manual_axes import varies_over, vary_over
from .quantize.sharing import merged_over

Values = TypeVar("Values")
States = TypeVar("States")


def vary_alike(values: Values, states: States = None) -> tuple[Values, States]:
    """Both, every array varying over all axes that any of them varies over; without shard_map as they are.

    values   a pytree of arrays
    states   one of quantizers or quantizer sets
    """
    axes = varies_over((values, states))
    return (vary_over(axes, values), _states_over(axes, states)) if axes else (values, states)


def _states_over(axes: frozenset[str], states: Any) -> Any:
    """The states of devices: their gradients, the next states, merge over the axes that were the same for all."""
    if isinstance(states, (tuple, list)):
        return tuple(_states_over(axes, state) for state in states)
    common = axes.difference(*(varies_over(leaf) for leaf in jax.tree.leaves(states)))
    return merged_over(vary_over(axes, states), tuple(sorted(common)))
