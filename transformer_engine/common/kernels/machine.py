"""The GPU's limits that plans of kernels depend on."""

from __future__ import annotations

from typing import NamedTuple

MEASURED_MEMORY = 227 << 10  # shared memory of an H200, on which plans were measured
_EXCHANGE_BYTES = 20 << 10  # 16 KiB of codes, and the buffers of reductions


class Machine(NamedTuple):
    """Multiprocessors, shared memory per program in bytes, and bytes read per element of a tile."""

    processors: int
    shared_memory: int
    bytes_read: int

    def stages(self, tile: int, stages: int) -> int:
        """Largest number of pipeline stages, at most `stages`, for tiles of this many elements.

        All stages but the current one are in the shared memory, which also exchanges results between threads.
        """
        room = (self.shared_memory - _EXCHANGE_BYTES) // (tile * self.bytes_read)
        return max(1, min(stages, room + 1))
