"""scale = (fp8_max / amax) / 2^margin for many delayed-scaling states, and one step for their amax histories."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ....common.dispatch import Table
from . import reference, triton
from .reference import ScaleUpdateRequest, history_amax, next_scale, roll_history

__all__ = [
    "TABLE",
    "ScaleUpdateRequest",
    "advance_scales",
    "history_amax",
    "next_scale",
    "roll_history",
]

TABLE: Table[ScaleUpdateRequest] = Table(
    "scale_update", (triton.BACKEND, reference.BACKEND), describe=ScaleUpdateRequest
)


def advance_scales(
    histories: Sequence[Tensor],
    scales: Sequence[Tensor],
    algorithm: str,
    fp8_max: float,
    margin: float,
    keep_idle: bool,
) -> None:
    """Advance delayed scaling by one step, in place, for each history and its scales.

    Row 0 of a history is the running step. It becomes the last row, row 1 is dropped, and row 0 is cleared.

    Args:
        histories: Amax histories, float32 [length, n].
        scales: Scales, float32 [n].
        algorithm: "max" over the history, or "most_recent".
        fp8_max: Largest value of the format.
        margin: Safety factor exponent.
        keep_idle: Columns whose latest amax is 0 keep scale and history.
    """
    length: int | None = histories[0].shape[0]
    columns = 0
    for history in histories:
        rows, width = history.shape
        if rows != length:
            length = None
        if width > columns:
            columns = width
    rule = (algorithm, fp8_max, margin, keep_idle)
    TABLE.bound((histories[0].device.type, length, columns, len(histories), *rule))(
        histories, scales
    )
