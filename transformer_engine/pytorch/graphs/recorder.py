"""The recorder of this machine."""

from __future__ import annotations

from typing import Any

import torch

from ..distributed.rng import get_all_rng_states
from ..runtime.capture import CudaRecorder, Recorder
from ..runtime.device import has_cuda


def recorder_here(pool: Any = None) -> Recorder | None:
    """What records graphs into a pool of memory, a new one for None; None without a GPU."""
    if not has_cuda():
        return None
    states = get_all_rng_states().values()
    return CudaRecorder(pool, [state for state in states if isinstance(state, torch.Generator)])
