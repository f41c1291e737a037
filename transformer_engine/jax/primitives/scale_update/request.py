"""What a scale update is asked for."""

from __future__ import annotations

from typing import NamedTuple


class ScaleUpdateRequest(NamedTuple):
    """How many states there are, and how many steps their histories hold."""

    states: int
    length: int
    platform: str = "cpu"
