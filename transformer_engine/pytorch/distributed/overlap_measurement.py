"""Measure the least message size for which overlap with a product is faster than the process group's collective.

The measurement, with a bfloat16 product of width 4096, runs once per machine and buffer size, and
is stored in the user's cache folder. All ranks in a group use the same sizes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...common.store import Store
from .overlapped_rows import GatheredRows, PeerBuffers, ScatteredRows

_WIDTH = 4096  # of the multiplied rows
_SIZES = [1 << exponent for exponent in range(20, 27)]  # bytes that a rank sends
_REPEATS = 8
_NEVER = -1
_VERSION = 3  # of the measurement, in the key
MEASUREMENTS = Store(
    "overlap",
    b"TEOVERL1",
    "measurements of overlap",
    logger="transformer_engine.overlap",
    remedy="set TE_CACHE_DIR",
)


class Thresholds(NamedTuple):
    """Least overlapping message size in bytes; None if no size is faster."""

    gather: int | None
    scatter: int | None


def load_thresholds(buffers: PeerBuffers, group: Any, device: torch.device) -> Thresholds:
    """Return the sizes of a group, measured unless the first rank finds them in its cache folder.

    Args:
        buffers: The buffers of the group.
        group: Process group; all its ranks call this function.
        device: This rank's device.
    """
    path = _path(buffers, device)
    stored: list[Any] = [_read_stored(path) if buffers.rank == 0 else None]
    dist.broadcast_object_list(stored, group_src=0, group=group)
    if stored[0] is None:
        stored[0] = _measure_sizes(buffers, group, device)
        if buffers.rank == 0 and path is not None:
            MEASUREMENTS.write(path, json.dumps(stored[0]).encode())
    return Thresholds(*[None if size == _NEVER else size for size in stored[0]])


def _path(buffers: PeerBuffers, device: torch.device) -> Path | None:
    largest = buffers.capacity.bit_length()  # sizes above it are not measured
    name = f"{torch.cuda.get_device_name(device)} {buffers.ranks} {largest} torch {torch.__version__} {_VERSION}"
    return MEASUREMENTS.path_of(name)


def _read_stored(path: Path | None) -> list[int] | None:
    """Return the sizes in a file, or None if there is none."""
    content = None if path is None else MEASUREMENTS.read(path)
    return None if content is None else json.loads(content)


def _measure_sizes(buffers: PeerBuffers, group: Any, device: torch.device) -> list[int]:
    """Return the least gather and reduce-scatter sizes, `_NEVER` if the process group is always faster."""
    least = []
    for measure in (_gather_ms, _scatter_ms):
        smallest = _NEVER
        for size in reversed([size for size in _SIZES if size <= buffers.capacity]):
            times = torch.tensor(measure(buffers, group, device, size), device=device)
            dist.all_reduce(times, dist.ReduceOp.MAX, group=group)
            overlapped, plain = times.tolist()
            if overlapped >= plain:
                break
            smallest = size
        least.append(smallest)
    return least


def _gather_ms(
    buffers: PeerBuffers, group: Any, device: torch.device, size: int
) -> tuple[float, float]:
    """Return the milliseconds for multiplying gathered rows: by parts, and after the process group's gather."""
    rows = size // (_WIDTH * torch.bfloat16.itemsize)
    x, weight = _random(device, rows, _WIDTH), _random(device, _WIDTH, _WIDTH // buffers.ranks)
    full, layout = x.new_empty(buffers.ranks * rows, _WIDTH), ((x.shape, x.dtype),)
    out = x.new_empty(buffers.ranks * rows, weight.shape[1])
    parts = out.chunk(buffers.ranks)

    def overlapped() -> None:
        gathered = GatheredRows(buffers, [x], layout, lambda tensors: tensors[0])
        for rank in gathered.order():
            torch.mm(gathered.rows_of(rank), weight, out=parts[rank])
        gathered.wait()

    def plain() -> None:
        dist.all_gather_into_tensor(full, x, group=group)
        torch.mm(full, weight, out=out)

    return _milliseconds(overlapped, group), _milliseconds(plain, group)


def _scatter_ms(
    buffers: PeerBuffers, group: Any, device: torch.device, size: int
) -> tuple[float, float]:
    """Return the milliseconds for a product whose rows are summed: by parts, and before the process group's sum."""
    peer_count = buffers.ranks - 1
    rows = max(size // (_WIDTH * torch.bfloat16.itemsize * peer_count), 1)
    x = _random(device, buffers.ranks * rows, _WIDTH // buffers.ranks)
    weight, out = _random(device, x.shape[1], _WIDTH), x.new_empty(rows, _WIDTH)
    parts = x.chunk(buffers.ranks)

    def multiply(rank: int, target: Tensor) -> None:
        torch.mm(parts[rank], weight, out=target)

    def overlapped() -> None:
        ScatteredRows(buffers, ((out.shape, out.dtype),) * peer_count, multiply).wait()

    def plain() -> None:
        dist.reduce_scatter_tensor(out, torch.mm(x, weight), group=group)

    return _milliseconds(overlapped, group), _milliseconds(plain, group)


def _random(device: torch.device, rows: int, columns: int) -> Tensor:
    """Return random values without changing the device's random state."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(rows, columns, device=device, dtype=torch.bfloat16, generator=generator)


def _milliseconds(step: Callable[[], None], group: Any) -> float:
    """Return the median step time in a loop, which is the host time if the host is slower than the GPU."""
    for _ in range(3):
        step()
    dist.barrier(group=group)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    times = sorted([first.elapsed_time(last) for first, last in itertools.pairwise(events)])
    return times[_REPEATS // 2]
