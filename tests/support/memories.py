"""forget(): clear every cache in the process, as in a new process."""

from __future__ import annotations

import functools
import gc
import sys


@functools.lru_cache(maxsize=1)
def _memories(loaded: int) -> tuple[dict, ...]:
    """Cache dictionaries of transformer_engine.common's classes; collected again when `loaded` changes."""
    common = "transformer_engine.common."
    return tuple(
        x
        for x in gc.get_objects()
        if issubclass(type(x), dict) and type(x).__module__.startswith(common)
    )


def forget() -> None:
    """Clear the caches that outlive a layer: the tables' choices, the bound calls, the plans."""
    # A dozen tables are in modules that are imported at first use, possibly after the first forget().
    for memory in _memories(sum(name.startswith("transformer_engine.") for name in sys.modules)):
        memory.clear()
