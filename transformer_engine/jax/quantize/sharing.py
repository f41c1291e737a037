"""States that are read several times in a step, by shared kernels, in micro-batches or under a scan, or on devices.

In shard_map with `check_vma=True`, JAX requires that a gradient varies over the same mesh axes as its argument. The
gradient for a parameter that all devices share is a sum: the transposed cast that makes the parameter vary. The
gradient of a state, its next state, is not a sum; next states merge as in `fan_out`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from ...common.checks import described, whole
from ...common.numbers import with_article
from ..runtime.manual_axes import cast_varying, varying_axes
from .grouped import GroupedQuantizer
from .quantizers import DelayedScaleQuantizer, Quantizer, QuantizerSet, as_cotangent

State = TypeVar("State", Quantizer, GroupedQuantizer, QuantizerSet, Mapping[str, Any])
Devices = TypeVar("Devices", Quantizer, QuantizerSet)
_SCALE, _HISTORY = "_scale", "_amax_history"  # how the leaves of a collection end


def fan_out(quantizer_set: State, n: int) -> tuple[State, ...]:
    """Copy a quantizer set, a quantizer, or a model's state n times, one copy for each use within a step.

    The cotangent of a quantizer is its next state. JAX adds the cotangents for an argument that is used several times,
    but added scales are not a scale. The next states of copies merge instead: the larger amax, hence the smaller scale.
    Unused copies do not count; if none is used, the state does not change.

    Args:
        quantizer_set: Quantizers, or the variables {"fp8_metas": ..} for a model that is applied several times.
        n: Number of copies.

    Raises:
        TypeError: quantizer_set is not a state.
    """
    whole("n", n)
    if isinstance(quantizer_set, Mapping):
        pairs = pairs_of_leaves(quantizer_set)
        leaves, tree = jax.tree.flatten(quantizer_set)
        if pairs is None:
            names = [
                jax.tree_util.keystr(path, simple=True, separator="/")
                for path, _ in jax.tree_util.tree_flatten_with_path(quantizer_set)[0]
            ]
            raise TypeError(
                f"quantizer_set holds {', '.join(names)}, not all of which are states of quantizers; give the "
                'collections of states alone, {"fp8_metas": variables["fp8_metas"]}'
            )
        # The code element type does not matter: nothing is quantized here.
        states = tuple(
            DelayedScaleQuantizer(
                jnp.dtype(jnp.float8_e4m3fn), scale=leaves[scale], amax_history=leaves[history]
            )
            for scale, history in pairs
        )
        copies = []
        for copy in _copies(n, False)(states):
            for (scale, history), state in zip(pairs, copy, strict=True):
                leaves[scale], leaves[history] = state.scale, state.amax_history
            copies.append(jax.tree.unflatten(tree, leaves))
        return tuple(copies)
    if not isinstance(quantizer_set, (Quantizer, GroupedQuantizer, QuantizerSet)):
        raise TypeError(
            f"quantizer_set={described(quantizer_set)} is {with_article(type(quantizer_set))}; give a quantizer, a "
            'quantizer set, or the variables {"fp8_metas": ..} of a model'
        )
    return _copies(n, False)(quantizer_set)


def pairs_of_leaves(collections: Any) -> list[tuple[int, int]] | None:
    """Indices of every scale and its history among the leaves, or None if there are leaves without a pair."""
    names = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_flatten_with_path(collections)[0]
    ]
    places = {name: index for index, name in enumerate(names)}
    pairs: list[tuple[int, int]] = []
    for name in names:
        stem = name.removesuffix(_SCALE).removesuffix(_HISTORY)
        scale, history = places.get(stem + _SCALE), places.get(stem + _HISTORY)
        if scale is None or history is None:
            return None
        if places[name] == scale:
            pairs.append((scale, history))
    return pairs


def one_and_rest(quantizer_set: State) -> tuple[State, State]:
    """Copy twice: the first copy for a product, the second for possible later uses.

    If the second is not used, the next state of the first is the result, and its kernel can update the state in place.
    """
    return _copies(2, True)(quantizer_set)


@functools.cache
def _copies(n: int, certain: bool) -> Any:
    """Build state -> n copies, whose cotangents merge; an unused copy costs nothing.

    Args:
        certain: Whether every copy whose cotangent is not a symbolic zero was used; otherwise its values decide.
    """

    @jax.custom_vjp
    def copies(state: Any) -> tuple[Any, ...]:
        return (state,) * n

    def forward(state: Any) -> tuple[tuple[Any, ...], Any]:
        state = jax.tree.map(lambda leaf: leaf.value, state)
        return (state,) * n, state

    def backward(state: Any, following: tuple[Any, ...]) -> tuple[Any]:
        return (
            _map_quantizers(
                lambda one, *copies: _merge_states(one, copies, certain), state, *following
            ),
        )

    copies.defvjp(forward, backward, symbolic_zeros=True)
    return copies


def _map_quantizers(function: Callable[..., Any], *states: Any) -> Any:
    """Apply a function to corresponding quantizers in equal structures: sets, tuples, or single quantizers."""
    if isinstance(states[0], QuantizerSet):
        parts = zip(*((state.x, state.kernel, state.dgrad) for state in states), strict=True)
        return QuantizerSet(*(function(*each) for each in parts))
    if isinstance(states[0], tuple):
        return tuple(function(*each) for each in zip(*states, strict=True))
    return function(*states)


def share_over_devices(quantizer_set: Devices, axes: tuple[str, ...], merges: bool) -> Devices:
    """Wrap a quantizer set, or quantizer, for use inside shard_map, with the gradient of one state.

    Args:
        quantizer_set: The set or quantizer.
        axes: Manual mesh axes over which the state is the same.
        merges: Whether the next states of the devices merge as in `fan_out`; otherwise they must be equal.
    """
    return _merge_function(axes, merges)(quantizer_set) if axes else quantizer_set


@functools.cache
def _merge_function(axes: tuple[str, ...], merges: bool) -> Any:
    @jax.custom_vjp
    def over(state: Any) -> Any:
        return state

    def backward(_: None, following: Any) -> tuple[Any]:
        # shard_map adds the devices' cotangents, so all but one are zero.
        first = lax.axis_index(axes) == 0
        return (_map_quantizers(lambda one: _share_states(one, axes, first, merges), following),)

    over.defvjp(lambda state: (state, None), backward)
    return over


def _share_states(state: Any, axes: tuple[str, ...], first: Array, merges: bool) -> Any:
    if isinstance(state, GroupedQuantizer):
        return GroupedQuantizer(_share_states(state.quantizer, axes, first, merges), state.n_groups)
    if not isinstance(state, DelayedScaleQuantizer):
        return state
    merged = {"scale": state.scale, "amax_history": state.amax_history}
    if merges:
        # The cotangent from a device that did not read the state (in a lax.cond) is 0, which does not count.
        scale = lax.pmin(jnp.where(state.scale > 0, state.scale, jnp.inf), axes)
        merged = {
            "scale": jnp.where(jnp.isinf(scale), 0, scale),
            "amax_history": lax.pmax(state.amax_history, axes),
        }
    return dataclasses.replace(
        state, **{n: jnp.where(first, leaf, 0) for n, leaf in merged.items()}
    )


def _merge_states(state: Any, following: Sequence[Any], certain: bool) -> Any:
    if isinstance(state, GroupedQuantizer):
        merged = _merge_states(state.quantizer, [copy.quantizer for copy in following], certain)
        return GroupedQuantizer(merged, state.n_groups)
    if not isinstance(state, DelayedScaleQuantizer):
        return as_cotangent(state)
    read = [copy for copy in following if not isinstance(copy.scale, SymbolicZero)]
    if not read:
        return state
    if certain and len(read) == 1:
        return dataclasses.replace(read[0], amax_history=_instantiate_leaf(read[0].amax_history))
    scale, history = read[0].scale, _instantiate_leaf(read[0].amax_history)
    for copy in read[1:]:
        # A scale is 0 in a copy that was not used.
        both_used = (scale > 0) & (copy.scale > 0)
        scale = jnp.where(both_used, jnp.minimum(scale, copy.scale), jnp.maximum(scale, copy.scale))
        history = jnp.maximum(history, _instantiate_leaf(copy.amax_history))
    used = scale > 0
    leaves = {
        "scale": jnp.where(used, scale, state.scale),
        # [.., 1] and [.., length] for one tensor, [.., groups] and [.., groups, length] for several
        "amax_history": jnp.where(
            used if used.ndim == history.ndim else used[..., None], history, state.amax_history
        ),
    }
    _, tree = jax.tree.flatten(state)
    return jax.tree.unflatten(tree, [leaves[name] for name in state.STATE])


def _instantiate_leaf(leaf: Any) -> Array:
    symbolic: Any = SymbolicZero
    return jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, symbolic) else leaf


Values = TypeVar("Values")
States = TypeVar("States")


def align_mesh_axes(values: Values, states: States = None) -> tuple[Values, States]:
    """Align one operation's arguments to vary over the mesh axes that any argument varies over.

    Args:
        values: Array pytree.
        states: Quantizers or quantizer sets.
    """
    axes = varying_axes((values, states))
    return (cast_varying(axes, values), _vary_states(axes, states)) if axes else (values, states)


def _vary_states(axes: frozenset[str], states: Any) -> Any:
    """Cast states to vary over axes; their next states merge over the axes that they did not vary over."""
    if isinstance(states, (tuple, list)):
        return tuple(_vary_states(axes, state) for state in states)
    common = axes.difference(*(varying_axes(leaf) for leaf in jax.tree.leaves(states)))
    return share_over_devices(cast_varying(axes, states), tuple(sorted(common)), merges=True)
