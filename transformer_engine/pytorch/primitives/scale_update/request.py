"""What a scale update is asked for."""

from __future__ import annotations

from typing import NamedTuple


class ScaleUpdateRequest(NamedTuple):
    """The device's type, the common length of the histories (None: they differ), the largest number of columns, the
    number of states, and the rule: see `advance_scales`."""

    device: str
    length: int | None
    columns: int
    states: int = 1
    algorithm: str = "max"
    fp8_max: float = 448.0
    margin: float = 0
    keep_idle: bool = True
