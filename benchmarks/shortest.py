"""Microseconds of the shortest of many calls: what the host takes when nothing disturbs it.

Apart from transformer_engine.cli.bench.measure, because it times checkouts from before there was one, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable


def shortest(call: Callable[[], object], times: int) -> float:
    clock = time.perf_counter_ns
    least = 1 << 62
    for _ in range(times):
        begin = clock()
        call()
        least = min(least, clock() - begin)
    return least / 1e3
