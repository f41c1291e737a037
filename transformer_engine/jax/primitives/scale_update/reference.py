"""The step in jnp operations: all states at once, with the bits of the PyTorch reference."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ....common.dispatch import Backend
from ....common.formats import FLOAT32_MAX
from .. import exact
from ..quantize import given_multiplier
from .request import ScaleUpdateRequest


def scale_of(amax: Array, scale: Array, maxima: tuple[float, ...], margin: float) -> Array:
    """(fp8_max / amax) / 2^margin, at most FLOAT32_MAX; where amax is 0, inf or NaN the old scale, of which 0 is 1."""
    computed = exact.divide(jnp.asarray(np.asarray(maxima, np.float32)), amax)
    if margin:
        computed = exact.divide(computed, jnp.full(amax.shape, 2.0**margin, jnp.float32))
    computed, bits = exact.bits_of(computed), exact.bits_of(amax)
    computed = jnp.where(computed == exact.INFINITY, exact.bits_of_constant(FLOAT32_MAX), computed)
    usable = (bits > 0) & (bits < exact.INFINITY)
    return exact.float_of(jnp.where(usable, computed, exact.bits_of(given_multiplier(scale))))


@functools.partial(jax.jit, static_argnames=("algorithm", "maxima", "margin"))
def advance_scales(
    histories: Array,
    scales: Array,
    amaxes: Array,
    algorithm: str,
    maxima: tuple[float, ...],
    margin: float,
) -> tuple[Array, Array]:
    """histories float32 [n, length], scales [n] and the amaxes [n] of this step -> both after it.

    algorithm   "max" over the history, or "most_recent"
    maxima      the greatest number of each state's element
    The amax takes place 0, which then becomes the last; place 1 is dropped, and place 0 is cleared.
    """
    latest = exact.bits_of(amaxes)[:, None]
    steps = jnp.concatenate((latest, exact.bits_of(histories)[:, 1:]), axis=1)
    reference = steps.max(axis=1) if algorithm == "max" else steps[:, 0]
    new_scales = scale_of(exact.float_of(reference), scales, maxima, margin)
    cleared = jnp.zeros_like(latest)
    moved = cleared if steps.shape[1] == 1 else jnp.concatenate((cleared, steps[:, 2:], latest), axis=1)
    # Once a step, not once for every reader of a scale.
    return lax.optimization_barrier((exact.float_of(moved), new_scales))


def run(
    states: tuple[tuple[Array, Array, Array], ...], algorithm: str, maxima: tuple[float, ...], margin: float
) -> tuple[tuple[Array, Array], ...]:
    """(history, scale) of every state (history, scale, amax) as they are shaped, made as those of one stack."""
    histories, scales, amaxes = zip(*states, strict=True)
    shape, groups = histories[0].shape, scales[0].shape[0]
    rows = jnp.concatenate([history.reshape(groups, -1) for history in histories])
    of_rows = tuple(maximum for maximum in maxima for _ in range(groups))
    moved, made = advance_scales(
        rows, jnp.concatenate(scales), jnp.concatenate(amaxes), algorithm, of_rows, margin
    )
    parts = (slice(place * groups, (place + 1) * groups) for place in range(len(states)))
    return tuple((moved[part].reshape(shape), made[part]) for part in parts)


BACKEND = Backend[ScaleUpdateRequest]("reference", bind=lambda request: run)
