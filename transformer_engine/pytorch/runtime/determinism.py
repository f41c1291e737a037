"""Whether results must have the same bits in every run; read by the backend tables and by autotuning."""

from __future__ import annotations

import torch

from ...common import dispatch, env
from .tracing import constant_while_tracing

_NAME = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
OFF, WARNS, RAISES = 0, 1, 2  # torch.get_deterministic_debug_mode() values
_written = env.watch(_NAME)  # value of the variable; None if it is unset


def is_demanded() -> bool:
    """Return whether te.deterministic(), torch's own switch, or NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 demands it."""
    if torch.are_deterministic_algorithms_enabled():
        return True
    return _written() is not None and not env.flag(_NAME)


def torch_determinism() -> int:
    """`torch.use_deterministic_algorithms` mode: OFF, WARNS (warn_only=True) or RAISES.

    With WARNS, PyTorch's attention keeps its non-deterministic backward algorithm.
    """
    return _find_enabled_mode() if torch.are_deterministic_algorithms_enabled() else OFF


@constant_while_tracing  # the compiler guards both switches, and traces reads of the first only
def _find_enabled_mode() -> int:
    return WARNS if torch.is_deterministic_algorithms_warn_only_enabled() else RAISES


dispatch.repeatable_when(is_demanded)
