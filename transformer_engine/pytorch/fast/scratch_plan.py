"""Placement of small buffers for a generated pass in one allocation.

An allocation takes 3.3 us on an H200's host, which small layers would pay once per buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...common.formats import round_up

_SCRATCH_ALIGNMENT = 256  # bytes: the largest alignment that a product algorithm requires


class Lifetime(NamedTuple):
    """The instructions that allocate a buffer with this many bytes and that read it last."""

    buffer: int
    first: int
    last: int
    bytes: int


def plan_scratch(lifetimes: Sequence[Lifetime]) -> tuple[dict[int, int], int]:
    """Place buffers for a few steps in one allocation, at distinct offsets if their lifetimes overlap.

    Each buffer gets the lowest offset that is free during its whole lifetime, in first-step order.

    Returns:
        {buffer: offset}, and the bytes of the allocation.
    """
    offsets: dict[int, int] = {}
    placed: list[Lifetime] = []
    for lifetime in sorted(lifetimes, key=lambda lifetime: lifetime.first):
        intervals = sorted(
            (offsets[other.buffer], offsets[other.buffer] + other.bytes)
            for other in placed
            if lifetime.first <= other.last
        )
        offset = 0
        for begin, end in intervals:
            if offset + lifetime.bytes <= begin:
                break
            offset = max(offset, round_up(end, _SCRATCH_ALIGNMENT))
        offsets[lifetime.buffer] = offset
        placed.append(lifetime)
    return offsets, max(
        (offsets[lifetime.buffer] + lifetime.bytes for lifetime in placed), default=0
    )
