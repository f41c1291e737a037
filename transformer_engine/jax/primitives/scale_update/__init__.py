"""scale = (fp8_max / amax) / 2^margin for several delayed-scaling states, and their histories moved on by one step."""

from __future__ import annotations

from jax import Array

from ....common.dispatch import Table
from . import reference
from .request import ScaleUpdateRequest

__all__ = ["TABLE", "ScaleUpdateRequest", "advance_scales"]

TABLE: Table[ScaleUpdateRequest] = Table("jax_scale_update", (reference.BACKEND,))


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
    request = ScaleUpdateRequest(histories.shape[0], histories.shape[1])
    return TABLE.bind(request)(histories, scales, amaxes, algorithm, maxima, margin)
