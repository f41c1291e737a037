"""One-element float32 tensors on a device: zeros in which kernels store a maximum, and uninitialized scalars."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...common.kernels.launch import current_stream

_SLOTS = 512
_slots: dict[tuple[int, int], list[Tensor]] = {}


def zero(device: torch.device) -> Tensor:
    """Return float32 [1] that holds 0; it is never returned again.

    Clearing four bytes takes a launch, 1.5 us on the GPU and 4 us on the host, so that 512 are
    cleared at a time. A captured graph clears its own numbers in every replay.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.float32, device=device)
    return _pop_slot(_find_slots(device), device)


def numbers(device: torch.device, zeroed: Sequence[bool]) -> list[Tensor]:
    """Return tensors float32 [1] for the current stream of the device; `zeroed` ones hold 0, as from `zero`.

    The others hold any value; on a GPU they are zeros too, because a slot costs less than an allocation.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return [
            (torch.zeros if cleared else torch.empty)(1, dtype=torch.float32, device=device)
            for cleared in zeroed
        ]
    slots = _find_slots(device)
    return [_pop_slot(slots, device) for _ in zeroed]


def _find_slots(device: torch.device) -> list[Tensor]:
    """Return the unused slots for the device's current stream."""
    return _slots.setdefault((device.index, current_stream(device.index)), [])


def _pop_slot(slots: list[Tensor], device: torch.device) -> Tensor:
    try:
        return slots.pop()
    except IndexError:  # not checked before the pop, because two threads can share a stream
        with torch.inference_mode(False), torch.no_grad():
            # 16 bytes apart, for alignment; .data, so that a write to one does not change the
            # version counters of the others.
            cleared = torch.zeros(_SLOTS, 4, dtype=torch.float32, device=device)
            first, *rest = (slot.data for slot in cleared[:, :1].unbind(0))
            slots.extend(rest)
            return first
