"""Replaces symmetric memory where ranks are threads in one process."""

from __future__ import annotations

import threading
from typing import Any

import torch


class Memory:
    """Per-thread buffers that all threads can read."""

    def __init__(self, size: int):
        self.buffers: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=60)

    def peers(self, rank: int, values: torch.Tensor) -> Peers:
        self.buffers[rank] = values
        self._barrier.wait()
        return Peers(self, rank)

    def wait(self) -> None:
        self._barrier.wait()


class Peers:
    """Replaces `torch._C._distributed_c10d._SymmetricMemory`."""

    def __init__(self, memory: Memory, rank: int):
        self.rank, self.world_size = rank, len(memory.buffers)
        self._memory = memory

    def get_buffer(
        self, rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int = 0
    ) -> torch.Tensor:
        (count,) = sizes
        result = self._memory.buffers[rank][storage_offset : storage_offset + count]
        assert result.dtype is dtype and result.numel() == count
        return result

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        self._memory.wait()
