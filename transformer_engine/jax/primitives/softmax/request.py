"""What a softmax is asked for."""

from __future__ import annotations

from typing import NamedTuple


class SoftmaxRequest(NamedTuple):
    """The scores' shape [b, h, q, k], whether some are hidden or a sink takes part, and the platform."""

    shape: tuple[int, ...]
    hidden: bool
    sink: bool
    platform: str
