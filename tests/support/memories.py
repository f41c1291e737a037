"""forget(): every memory of the process begins empty again, as in a process that has called nothing yet."""

from __future__ import annotations

import functools
import gc
import sys


@functools.lru_cache(maxsize=1)
def _memories(loaded: int) -> tuple[dict, ...]:
    """The dictionaries of the kinds that transformer_engine.common makes for remembering, while so many modules are."""
    common = "transformer_engine.common."
    return tuple(
        x for x in gc.get_objects() if issubclass(type(x), dict) and type(x).__module__.startswith(common)
    )


def forget() -> None:
    """Empty the tables' choices, the bound calls, the plans: whatever outlives a layer."""
    # A dozen tables are in modules that are imported with their first use, which may be after the first forget().
    for memory in _memories(sum(name.startswith("transformer_engine.") for name in sys.modules)):
        memory.clear()
