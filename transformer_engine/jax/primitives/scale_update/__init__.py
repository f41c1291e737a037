"""scale = (fp8_max / amax) / 2^margin for several delayed-scaling states, and their histories moved on by one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jax import Array

from ....common.dispatch import Table
from ..platforms import computed
from . import reference, triton
from .reference import advance_scales
from .request import ScaleUpdateRequest

__all__ = ["TABLE", "ScaleUpdateRequest", "State", "advance_scales", "advance_states"]

TABLE: Table[ScaleUpdateRequest] = Table("jax_scale_update", (triton.BACKEND, reference.BACKEND))


class State(NamedTuple):
    """history float32 [length] and scale [1] of one tensor; amax [1] of this step."""

    history: Array
    scale: Array
    amax: Array


def advance_states(
    states: Sequence[State], algorithm: str, maxima: tuple[float, ...], margin: float
) -> list[tuple[Array, Array]]:
    """(history, scale) of every state after this step, as of `advance_scales`; they are not moved together for it."""
    length = states[0].history.shape[0]
    made = computed(
        TABLE, lambda platform: ScaleUpdateRequest(len(states), length, platform), tuple(map(tuple, states)),
        algorithm=algorithm, maxima=maxima, margin=margin,
    )  # fmt: skip
    return [(history, scale) for history, scale in made]
