"""Updates several delayed-scaling states: scale = (fp8_max / amax) / 2^margin, histories advanced by one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jax import Array

from ....common.dispatch import Table
from ..platforms import compute
from . import reference, triton
from .reference import ScaleUpdateRequest, advance_scales

__all__ = ["TABLE", "ScaleState", "ScaleUpdateRequest", "advance_scales", "advance_states"]

TABLE: Table[ScaleUpdateRequest] = Table("jax_scale_update", (triton.BACKEND, reference.BACKEND))


class ScaleState(NamedTuple):
    """History float32 [length] and scale [1] for one tensor; [G, length] and [G] for G groups; amax like the scale."""

    history: Array
    scale: Array
    amax: Array


def advance_states(
    states: Sequence[ScaleState], algorithm: str, maxima: tuple[float, ...], margin: float
) -> list[tuple[Array, Array]]:
    """Compute (history, scale) of every state after this step; see `advance_scales`.

    All states must have the same number of groups and steps. A kernel reads them without copying them together.
    """
    length, groups = states[0].history.shape[-1], states[0].scale.shape[0]
    updated = compute(
        TABLE,
        lambda platform: ScaleUpdateRequest(len(states), length, platform, groups),
        tuple(map(tuple, states)),
        algorithm=algorithm,
        maxima=maxima,
        margin=margin,
    )
    return [(history, scale) for history, scale in updated]
