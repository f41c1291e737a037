"""Do results have to have the same bits in every run? Asked by tables of backends, and by what measures."""

from __future__ import annotations

import torch

from ...common import dispatch, env

_NAME = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
_written = env.watch(_NAME)  # what the variable holds, None where it is not set


def is_demanded() -> bool:
    """By te.deterministic(), which is torch's own switch too, or by NVTE_ALLOW_NONDETERMINISTIC_ALGO=0."""
    if torch.are_deterministic_algorithms_enabled():
        return True
    return _written() is not None and not env.flag(_NAME)


dispatch.repeatable_when(is_demanded)
