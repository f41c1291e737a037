"""Alias of transformer_engine.pytorch.cpu_offload, under NVIDIA's first name."""

from ..common import absent
from .cpu_offload import (
    AsyncDoubleBufferGroupOffloadHandler,
    CPUOffloadEnabled,
    CpuOffloadHookWithOffloadHandler,
    GroupCommitFunction,
    SynchronizedGroupOffloadHandler,
    get_cpu_offload_context,
    is_cpu_offload_enabled,
    mark_activation_offload,
)

__all__ = [
    "AsyncDoubleBufferGroupOffloadHandler",
    "CPUOffloadEnabled",
    "CpuOffloadHookWithOffloadHandler",
    "GroupCommitFunction",
    "SynchronizedGroupOffloadHandler",
    "get_cpu_offload_context",
    "is_cpu_offload_enabled",
    "mark_activation_offload",
]

absent.install_getter(__name__)
