"""Microseconds in the shortest among many calls: the host time without disturbances.

It does not use transformer_engine_tools.bench.measure, because it also times checkouts that lack this module.
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
