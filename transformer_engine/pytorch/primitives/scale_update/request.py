"""What a scale update is asked for."""

from __future__ import annotations

from typing import NamedTuple


class ScaleUpdateRequest(NamedTuple):
    """The device's type, the common length of the histories (None: they differ) and the largest number of columns."""

    device: str
    length: int | None
    columns: int
