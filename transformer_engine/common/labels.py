"""Labels of a cross entropy: what one is told about its targets, whatever the framework."""

from __future__ import annotations

from typing import NamedTuple


class Labels(NamedTuple):
    """What is the same for all rows.

    ignored     the target of rows that do not count
    smoothing   the share of probability that is spread over all ids
    first       the id of column 0
    total       ids of all ranks together
    """

    ignored: int
    smoothing: float
    first: int
    total: int
