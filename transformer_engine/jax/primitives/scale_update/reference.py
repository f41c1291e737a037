"""Scale-update request, and its reference in jnp operations: all states at once, bit-equal to PyTorch's."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ....common.dispatch import Backend
from ....common.formats import FLOAT32_MAX
from .. import exact
from ..quantize import nonzero_multiplier


class ScaleUpdateRequest(NamedTuple):
    """Update properties that determine its backend.

    Attributes:
        states: Number of states.
        length: Their history length.
        platform: Platform of the program, "cpu" or "cuda".
        groups: Number of groups per state.
    """

    states: int
    length: int
    platform: str = "cpu"
    groups: int = 1


def next_scale(amax: Array, scale: Array, maxima: tuple[float, ...], margin: float) -> Array:
    """Compute (fp8_max / amax) / 2^margin, at most FLOAT32_MAX.

    Where amax is 0, infinite or NaN, the old scale remains, with 1 replacing 0.
    """
    computed = exact.divide(jnp.asarray(np.asarray(maxima, np.float32)), amax)
    if margin:
        computed = exact.divide(computed, jnp.full(amax.shape, 2.0**margin, jnp.float32))
    computed, bits = exact.float_bits(computed), exact.float_bits(amax)
    computed = jnp.where(computed == exact.INFINITY, exact.bits_of_constant(FLOAT32_MAX), computed)
    usable = (bits > 0) & (bits < exact.INFINITY)
    return exact.bits_to_float(
        jnp.where(usable, computed, exact.float_bits(nonzero_multiplier(scale)))
    )


@functools.partial(jax.jit, static_argnames=("algorithm", "maxima", "margin"))
def advance_scales(
    histories: Array,
    scales: Array,
    amaxes: Array,
    algorithm: str,
    maxima: tuple[float, ...],
    margin: float,
) -> tuple[Array, Array]:
    """Compute the histories and scales after a step.

    The amax is written to index 0, which then becomes the last; index 1 is dropped, and index 0 is cleared.

    Args:
        histories: float32 [n, length].
        scales: float32 [n].
        amaxes: Absolute maxima in this step, float32 [n].
        algorithm: "max" over the history, or "most_recent".
        maxima: Largest number in each state's element type.
        margin: Exponent of the margin.
    """
    latest = exact.float_bits(amaxes)[:, None]
    steps = jnp.concatenate((latest, exact.float_bits(histories)[:, 1:]), axis=1)
    reference = steps.max(axis=1) if algorithm == "max" else steps[:, 0]
    new_scales = next_scale(exact.bits_to_float(reference), scales, maxima, margin)
    cleared = jnp.zeros_like(latest)
    advanced = (
        cleared if steps.shape[1] == 1 else jnp.concatenate((cleared, steps[:, 2:], latest), axis=1)
    )
    # Computed once per step, not once for every scale reader.
    return lax.optimization_barrier((exact.bits_to_float(advanced), new_scales))


def run(
    states: tuple[tuple[Array, Array, Array], ...],
    algorithm: str,
    maxima: tuple[float, ...],
    margin: float,
) -> tuple[tuple[Array, Array], ...]:
    """Compute every state's (history, scale) from (history, scale, amax) in their shapes, as one stack."""
    histories, scales, amaxes = zip(*states, strict=True)
    shape, groups = histories[0].shape, scales[0].shape[0]
    rows = jnp.concatenate([history.reshape(groups, -1) for history in histories])
    of_rows = tuple(maximum for maximum in maxima for _ in range(groups))
    advanced, updated = advance_scales(
        rows, jnp.concatenate(scales), jnp.concatenate(amaxes), algorithm, of_rows, margin
    )
    parts = (slice(index * groups, (index + 1) * groups) for index in range(len(states)))
    return tuple((advanced[part].reshape(shape), updated[part]) for part in parts)


BACKEND = Backend[ScaleUpdateRequest]("reference", bind=lambda request: run)
