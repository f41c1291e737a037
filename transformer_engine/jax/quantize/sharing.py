"""One state read several times in a step: by a shared kernel, in micro-batches, under a scan."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from ...common.checks import whole
from ..sharding import varies_over, varying_alike
from .grouped import GroupedQuantizer
from .quantizers import DelayedScaleQuantizer, Quantizer, QuantizerSet, as_cotangent

State = TypeVar("State", Quantizer, GroupedQuantizer, QuantizerSet)


def fan_out(quantizer_set: State, n: int) -> tuple[State, ...]:
    """n copies of a quantizer set (or of one quantizer), one for each use of it within a step.

    The cotangent of a quantizer is its next state, and JAX adds the cotangents of what is used several times: the sum
    of scales is no scale. Of copies the next states merge instead: the larger amax, hence the smaller scale. Copies
    that were not used do not count; where none was, the state stays as it is.
    """
    whole("n", n)
    return _copies(n, False)(quantizer_set)


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
    def copies(state: State) -> tuple[State, ...]:
        return (state,) * n

    def forward(state: Any) -> tuple[tuple[Any, ...], Any]:
        state = jax.tree.map(lambda leaf: leaf.value, state)
        return (state,) * n, state

    def backward(state: Any, following: tuple[Any, ...]) -> tuple[Any]:
        if isinstance(state, QuantizerSet):
            parts = ("x", "kernel", "dgrad")
            merged = [
                _merged(getattr(state, p), [getattr(copy, p) for copy in following], certain) for p in parts
            ]
            return (QuantizerSet(*merged),)
        return (_merged(state, following, certain),)

    copies.defvjp(forward, backward, symbolic_zeros=True)
    return copies


def merged_over(quantizer_set: QuantizerSet, axes: tuple[str, ...]) -> QuantizerSet:
    """The set within shard_map, where devices along axes hold copies of it: next states merge as in `fan_out`."""
    return _over(axes)(quantizer_set) if axes else quantizer_set


def shared_by_devices(quantizer_set: QuantizerSet, *arrays: Any) -> QuantizerSet:
    """The set for a product of arrays inside shard_map, by its default check_vma: devices that share a state and have
    parts of the arrays each make a next state, which merge as in `fan_out`."""
    over = varies_over(arrays) - varies_over(quantizer_set)
    if not over or not jax.tree.leaves(quantizer_set):
        return quantizer_set
    _, cast = varying_alike(arrays, quantizer_set)
    return merged_over(cast, tuple(sorted(over)))


@functools.cache
def _over(axes: tuple[str, ...]) -> Any:
    @jax.custom_vjp
    def over(state: QuantizerSet) -> QuantizerSet:
        return state

    def backward(_: None, following: QuantizerSet) -> tuple[QuantizerSet]:
        # shard_map adds what copies answer, so that one of them answers for all.
        first = lax.axis_index(axes) == 0
        parts = (following.x, following.kernel, following.dgrad)
        return (QuantizerSet(*[_of_devices(part, axes, first) for part in parts]),)

    over.defvjp(lambda state: (state, None), backward)
    return over


def _of_devices(state: Any, axes: tuple[str, ...], first: Array) -> Any:
    if isinstance(state, GroupedQuantizer):
        return GroupedQuantizer(_of_devices(state.quantizer, axes, first), state.n_groups)
    if not isinstance(state, DelayedScaleQuantizer):
        return state
    merged = {"scale": lax.pmin(state.scale, axes), "amax_history": lax.pmax(state.amax_history, axes)}
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
        # [length] of one tensor, [groups, length] of several
        "amax_history": jnp.where(used if history.ndim == 1 else used[:, None], history, state.amax_history),
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
