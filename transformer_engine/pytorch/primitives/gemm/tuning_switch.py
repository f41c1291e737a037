"""Is somebody asking for the fastest of a library's algorithms?"""

from __future__ import annotations

from ....common import env
from ...runtime.determinism import is_demanded


class Switch:
    """How many `autotune` contexts are open, in any thread: the backward pass runs in another one."""

    depth = 0


_NAME = "NVTE_AUTOTUNE"
asked = env.watch(_NAME)  # what the variable holds, None where it is not set
asked_in_eager_mode = env.watch_in_eager_mode(_NAME)


def wanted() -> bool:
    """Is tuning asked for, by a context or for the whole process? Not where every run has to give the same bits."""
    if is_demanded():
        return False
    return Switch.depth > 0 or (asked() is not None and env.flag(_NAME))
