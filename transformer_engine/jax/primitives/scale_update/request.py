"""What a scale update is asked for."""

from __future__ import annotations

from typing import NamedTuple


class ScaleUpdateRequest(NamedTuple):
    """How many states there are, how many steps their histories hold, and how many groups each is of."""

    states: int
    length: int
    platform: str = "cpu"
    groups: int = 1
