"""offset[buffer] = plan(lives): buffers of a few steps in one piece of memory, apart where lives overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...common.formats import round_up

_APART = 256  # bytes; the most that a product's algorithm asks of a pointer


class Life(NamedTuple):
    """A buffer of so many bytes, from the step that makes it to the one that reads it last."""

    buffer: int
    first: int
    last: int
    bytes: int


class Plan(NamedTuple):
    offsets: dict[int, int]
    bytes: int


def plan(lives: Sequence[Life]) -> Plan:
    """Each buffer in the order of their beginnings at the lowest place that is free for all its life."""
    offsets: dict[int, int] = {}
    placed: list[Life] = []
    for life in sorted(lives, key=lambda life: life.first):
        taken = sorted(
            (offsets[other.buffer], offsets[other.buffer] + other.bytes)
            for other in placed
            if life.first <= other.last
        )
        offset = 0
        for begin, end in taken:
            if offset + life.bytes <= begin:
                break
            offset = max(offset, round_up(end, _APART))
        offsets[life.buffer] = offset
        placed.append(life)
    return Plan(offsets, max((offsets[life.buffer] + life.bytes for life in placed), default=0))
