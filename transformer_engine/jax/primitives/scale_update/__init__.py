"""scale = (fp8_max / amax) / 2^margin for several delayed-scaling states, and their histories moved on by one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jax import Array

from ....common.dispatch import Table
from ..platforms import compute
from . import reference, triton
from .reference import advance_scales
from .request import ScaleUpdateRequest

__all__ = ["TABLE", "ScaleUpdateRequest", "State", "advance_scales", "advance_states"]

TABLE: Table[ScaleUpdateRequest] = Table("jax_scale_update", (triton.BACKEND, reference.BACKEND))


class State(NamedTuple):
    """history float32 [length] and scale [1] of one tensor, or [G, length] and [G] of G groups; amax like the scale."""

    history: Array
    scale: Array
    amax: Array


def advance_states(
    states: Sequence[State], algorithm: str, maxima: tuple[float, ...], margin: float
) -> list[tuple[Array, Array]]:
    """(history, scale) of every state after this step, as of `advance_scales`; they are not moved together for it.

    All are of as many groups and steps.
    """
    length, groups = states[0].history.shape[-1], states[0].scale.shape[0]
    made = compute(
        TABLE, lambda platform: ScaleUpdateRequest(len(states), length, platform, groups), tuple(map(tuple, states)),
        algorithm=algorithm, maxima=maxima, margin=margin,
    )  # fmt: skip
    return [(history, scale) for history, scale in made]
