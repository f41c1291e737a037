"""One state read several times in a step: by a shared kernel, in micro-batches, under a scan."""

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
from .grouped import GroupedQuantizer
from .quantizers import DelayedScaleQuantizer, Quantizer, QuantizerSet, as_cotangent

State = TypeVar("State", Quantizer, GroupedQuantizer, QuantizerSet, Mapping[str, Any])
Devices = TypeVar("Devices", Quantizer, QuantizerSet)
_SCALE, _HISTORY = "_scale", "_amax_history"  # how the leaves of a collection end


def fan_out(quantizer_set: State, n: int) -> tuple[State, ...]:
    """n copies of a quantizer set, of one quantizer, or of a model's state, one for each use of it within a step.

    quantizer_set   or the variables {"fp8_metas": ..} of a model that is applied several times in one step
    The cotangent of a quantizer is its next state, and JAX adds the cotangents of what is used several times: the sum
    of scales is no scale. Of copies the next states merge instead: the larger amax, hence the smaller scale. Copies
    that were not used do not count; where none was, the state stays as it is. Raises TypeError for what is no state.
    """
    whole("n", n)
    if isinstance(quantizer_set, Mapping):
        return _of_collections(quantizer_set, n)
    if not isinstance(quantizer_set, (Quantizer, GroupedQuantizer, QuantizerSet)):
        raise TypeError(
            f"quantizer_set={described(quantizer_set)} is a {type(quantizer_set).__name__}; give a quantizer, a "
            'quantizer set, or the variables {"fp8_metas": ..} of a model'
        )
    return _copies(n, False)(quantizer_set)


def _of_collections(collections: Any, n: int) -> tuple[Any, ...]:
    """n copies of nested dicts, in which every `*_scale` has its `*_amax_history` next to it."""
    pairs = pairs_of_leaves(collections)
    leaves, tree = jax.tree.flatten(collections)
    if pairs is None:
        names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in _flat(collections)]
        raise TypeError(
            f"quantizer_set holds {', '.join(names)}, not all of which are states of quantizers; give the collections "
            'of states alone, {"fp8_metas": variables["fp8_metas"]}'
        )
    # The element type of the codes does not matter: nothing is quantized here.
    states = tuple(
        DelayedScaleQuantizer(jnp.dtype(jnp.float8_e4m3fn), scale=leaves[scale], amax_history=leaves[history])
        for scale, history in pairs
    )
    copies = []
    for copy in _copies(n, False)(states):
        for (scale, history), state in zip(pairs, copy, strict=True):
            leaves[scale], leaves[history] = state.scale, state.amax_history
        copies.append(jax.tree.unflatten(tree, leaves))
    return tuple(copies)


def _flat(collections: Any) -> Sequence[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(collections)[0]


def pairs_of_leaves(collections: Any) -> list[tuple[int, int]] | None:
    """Return the places of every scale and its history among the leaves, or None if there are leaves without a pair."""
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in _flat(collections)]
    places = {name: place for place, name in enumerate(names)}
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
    """Two copies, of which a product reads the first, and the second is for uses that may follow.

    Where none does, the first one's next state is taken as it is: its kernels then update the state's own memory.
    """
    return _copies(2, True)(quantizer_set)


@functools.cache
def _copies(n: int, certain: bool) -> Any:
    """state -> n of it, whose cotangents merge; a copy that nothing read costs nothing.

    certain   a copy whose cotangent is no symbolic zero has been read; else its values tell
    """

    @jax.custom_vjp
    def copies(state: Any) -> tuple[Any, ...]:
        return (state,) * n

    def forward(state: Any) -> tuple[tuple[Any, ...], Any]:
        state = jax.tree.map(lambda leaf: leaf.value, state)
        return (state,) * n, state

    def backward(state: Any, following: tuple[Any, ...]) -> tuple[Any]:
        return (_by_quantizer(lambda one, *copies: _merged(one, copies, certain), state, *following),)

    copies.defvjp(forward, backward, symbolic_zeros=True)
    return copies


def _by_quantizer(function: Callable[..., Any], *states: Any) -> Any:
    """function of the quantizers that have one place in states that are alike: sets, tuples, or one quantizer each."""
    if isinstance(states[0], QuantizerSet):
        parts = zip(*((state.x, state.kernel, state.dgrad) for state in states), strict=True)
        return QuantizerSet(*(function(*each) for each in parts))
    if isinstance(states[0], tuple):
        return tuple(function(*each) for each in zip(*states, strict=True))
    return function(*states)


def merged_over(quantizer_set: Devices, axes: tuple[str, ...]) -> Devices:
    """The set, or quantizer, within shard_map, whose next states merge over devices along axes as in `fan_out`."""
    return _over(axes, True)(quantizer_set) if axes else quantizer_set


def alike_over(quantizer_set: Devices, axes: tuple[str, ...]) -> Devices:
    """The set, or quantizer, within shard_map, whose next states are the same on all devices along axes."""
    return _over(axes, False)(quantizer_set) if axes else quantizer_set


@functools.cache
def _over(axes: tuple[str, ...], merges: bool) -> Any:
    @jax.custom_vjp
    def over(state: Any) -> Any:
        return state

    def backward(_: None, following: Any) -> tuple[Any]:
        # shard_map adds what copies answer, so that one of them answers for all.
        first = lax.axis_index(axes) == 0
        return (_by_quantizer(lambda one: _of_devices(one, axes, first, merges), following),)

    over.defvjp(lambda state: (state, None), backward)
    return over


def _of_devices(state: Any, axes: tuple[str, ...], first: Array, merges: bool) -> Any:
    if isinstance(state, GroupedQuantizer):
        return GroupedQuantizer(_of_devices(state.quantizer, axes, first, merges), state.n_groups)
    if not isinstance(state, DelayedScaleQuantizer):
        return state
    merged = {"scale": state.scale, "amax_history": state.amax_history}
    if merges:
        # A device that left the state unread (by lax.cond, say) answers 0, which does not count; 0 where none read it.
        scale = lax.pmin(jnp.where(state.scale > 0, state.scale, jnp.inf), axes)
        merged = {
            "scale": jnp.where(jnp.isinf(scale), 0, scale), "amax_history": lax.pmax(state.amax_history, axes),
        }  # fmt: skip
    return dataclasses.replace(state, **{n: jnp.where(first, leaf, 0) for n, leaf in merged.items()})


def _merged(state: Any, following: Sequence[Any], certain: bool) -> Any:
    if isinstance(state, GroupedQuantizer):
        merged = _merged(state.quantizer, [copy.quantizer for copy in following], certain)
        return GroupedQuantizer(merged, state.n_groups)
    if not isinstance(state, DelayedScaleQuantizer):
        return as_cotangent(state)
    read = [copy for copy in following if not isinstance(copy.scale, SymbolicZero)]
    if not read:
        return state
    if certain and len(read) == 1:
        return dataclasses.replace(read[0], amax_history=_instantiated(read[0].amax_history))
    scale, history = functools.reduce(
        _of_both, [(copy.scale, _instantiated(copy.amax_history)) for copy in read]
    )
    used = scale > 0
    leaves = {
        "scale": jnp.where(used, scale, state.scale),
        # [.., 1] and [.., length] of one tensor, [.., groups] and [.., groups, length] of several
        "amax_history": jnp.where(
            used if used.ndim == history.ndim else used[..., None], history, state.amax_history
        ),
    }
    _, tree = jax.tree.flatten(state)
    return jax.tree.unflatten(tree, [leaves[name] for name in state.STATE])


def _of_both(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
    """Scale and history of two copies; a scale is above zero but for a copy that was not used."""
    both_used = (one[0] > 0) & (other[0] > 0)
    scale = jnp.where(both_used, jnp.minimum(one[0], other[0]), jnp.maximum(one[0], other[0]))
    return scale, jnp.maximum(one[1], other[1])


def _instantiated(leaf: Any) -> Array:
    symbolic: Any = SymbolicZero
    return jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, symbolic) else leaf
