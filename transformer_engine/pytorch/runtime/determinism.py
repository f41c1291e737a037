"""Whether results must have the same bits in every run; read by the tables of backends and by autotuning."""

from __future__ import annotations

import torch

from ...common import dispatch, env

_NAME = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
_written = env.watch(_NAME)  # value of the variable; None if it is unset


def is_demanded() -> bool:
    """Return whether te.deterministic(), torch's own switch, or NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 demands it."""
    if torch.are_deterministic_algorithms_enabled():
        return True
    return _written() is not None and not env.flag(_NAME)


dispatch.repeatable_when(is_demanded)
