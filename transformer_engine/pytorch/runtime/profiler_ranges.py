"""Ranges in NVIDIA profiler timelines, which NVTE_NVTX_ENABLED=1 switches on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ...common import env

_ranges: list[str] = []  # messages of the open profiler ranges


def nvtx_range_push(msg: str) -> None:
    """Begin a profiler range, with NVTE_NVTX_ENABLED=1 on a GPU; otherwise do nothing."""
    if env.flag("NVTE_NVTX_ENABLED") and torch.cuda.is_available():
        torch.cuda.nvtx.range_push(msg)
        _ranges.append(msg)


def nvtx_range_pop(msg: str | None = None) -> None:
    """End the innermost profiler range, with NVTE_NVTX_ENABLED=1 on a GPU; otherwise do nothing.

    Args:
        msg: Message for the range that should end; None for any.

    Raises:
        RuntimeError: No range is open.
        ValueError: The innermost range has another message.
    """
    if not (env.flag("NVTE_NVTX_ENABLED") and torch.cuda.is_available()):
        return
    if not _ranges:
        raise RuntimeError("no profiler range is open; call nvtx_range_push before nvtx_range_pop")
    if msg is not None and msg != _ranges[-1]:
        raise ValueError(
            f"the innermost profiler range is {_ranges[-1]!r}, not {msg!r}; end ranges in reverse order"
        )
    _ranges.pop()
    torch.cuda.nvtx.range_pop()


@contextlib.contextmanager
def get_nvtx_range_context(msg: str) -> Iterator[None]:
    """Mark a block as a profiler range, also if it raises an exception; see `nvtx_range_push`.

    Args:
        msg: Range name in the timeline.
    """
    nvtx_range_push(msg)
    try:
        yield
    finally:
        nvtx_range_pop(msg)
