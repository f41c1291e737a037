"""Offloading activations that a model's first layers save to host memory: contexts, marks, schedules.

A layer's tensor states are in `offload/layer_state.py`, the schedule in `offload/synchronizer.py`.
"""

from __future__ import annotations

from .offload.context import get_cpu_offload_context
from .offload.hooks import (
    AsyncDoubleBufferGroupOffloadHandler,
    CpuOffloadHookWithOffloadHandler,
    GroupCommitFunction,
    SynchronizedGroupOffloadHandler,
)
from .offload.layer_state import OffloadableLayerState
from .offload.marks import (
    is_cpu_offload_enabled,
    mark_activation_offload,
    mark_not_offload,
    start_offload,
)
from .offload.synchronizer import (
    DefaultOffloadSynchronizer,
    ManualOffloadSynchronizer,
    OffloadSynchronizer,
)

# Set by callers that use NVIDIA's first interface; only the contexts determine the offloaded tensors.
CPUOffloadEnabled = False

__all__ = [
    "AsyncDoubleBufferGroupOffloadHandler",
    "CPUOffloadEnabled",
    "CpuOffloadHookWithOffloadHandler",
    "DefaultOffloadSynchronizer",
    "GroupCommitFunction",
    "ManualOffloadSynchronizer",
    "OffloadSynchronizer",
    "OffloadableLayerState",
    "SynchronizedGroupOffloadHandler",
    "get_cpu_offload_context",
    "is_cpu_offload_enabled",
    "mark_activation_offload",
    "mark_not_offload",
    "start_offload",
]
