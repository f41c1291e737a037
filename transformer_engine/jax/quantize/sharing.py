"""One state read several times in a step: by a shared kernel, in micro-batches, under a scan."""

from __future__ import annotations

import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from ...common.checks import whole
from .quantizers import DelayedScaleQuantizer, Quantizer, QuantizerSet, as_cotangent

State = TypeVar("State", Quantizer, QuantizerSet)


def fan_out(quantizer_set: State, n: int) -> tuple[State, ...]:
    """n copies of a quantizer set (or of one quantizer), one for each use of it within a step.

    The cotangent of a quantizer is its next state, and JAX adds the cotangents of what is used several times: the sum
    of scales is no scale. Of copies the next states merge instead: the larger amax, hence the smaller scale. Copies
    that were not used do not count; where none was, the state stays as it is.
    """
    whole("n", n)
    return _copies(quantizer_set, n)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _copies(state: State, n: int) -> tuple[State, ...]:
    return (state,) * n


def _copies_fwd(state: State, n: int) -> tuple[tuple[State, ...], State]:
    return (state,) * n, state


def _copies_bwd(n: int, state: State, following: tuple[State, ...]) -> tuple[State]:
    if isinstance(state, Quantizer):
        return (_merged(state, following),)  # pyright: ignore[reportReturnType]
    parts = ("x", "kernel", "dgrad")
    merged = [_merged(getattr(state, part), [getattr(copy, part) for copy in following]) for part in parts]
    return (QuantizerSet(*merged),)  # pyright: ignore[reportReturnType]


def _merged(state: Quantizer | None, following) -> Quantizer | None:
    if not isinstance(state, DelayedScaleQuantizer):
        return as_cotangent(state)
    scales = jnp.stack([copy.scale for copy in following])
    histories = jnp.stack([copy.amax_history for copy in following])
    # A state's scale is above zero, the cotangent of a copy without a use is zero.
    used: Array = scales > 0
    least = jnp.min(jnp.where(used, scales, jnp.inf), axis=0)
    any_used = jnp.any(used, axis=0)
    leaves = {
        "scale": jnp.where(any_used, least, state.scale),
        "amax_history": jnp.where(any_used, jnp.max(histories, axis=0), state.amax_history),
    }
    _, tree = jax.tree.flatten(state)
    return jax.tree.unflatten(tree, [leaves[name] for name in state.STATE])


_copies.defvjp(_copies_fwd, _copies_bwd)
