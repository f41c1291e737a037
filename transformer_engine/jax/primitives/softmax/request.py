"""What a softmax is asked for."""

from __future__ import annotations

from typing import NamedTuple


class SoftmaxRequest(NamedTuple):
    """How many keys there are, and whether some are hidden or a sink takes part."""

    keys: int
    hidden: bool
    sink: bool
