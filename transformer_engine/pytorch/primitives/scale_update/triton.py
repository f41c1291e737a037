"""The step on a GPU: one launch for all states, which it finds through an address table on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ....common.kernels import launch
from ...runtime.device import current_hardware, is_current_device
from ...runtime.device_tables import DeviceTables
from . import reference
from .reference import ScaleUpdateRequest

_LIMIT = 1 << 15  # delayed_scaling.LIMIT, whose module imports triton


def unsupported_reason(request: ScaleUpdateRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    if request.device != "cuda":
        return f"it needs a CUDA device, the states are on {request.device}"
    if (reason := launch.unavailable_reason(current_hardware())) is not None:
        return reason
    if request.length is None:
        return "the histories differ in length"
    if request.length > _LIMIT:
        return f"a history of {request.length} steps exceeds {_LIMIT}"
    return None


def bind(request: ScaleUpdateRequest) -> Callable[[Sequence[Tensor], Sequence[Tensor]], None]:
    """Return (histories, scales) -> None, which updates both in place."""
    from ....common.kernels import delayed_scaling

    assert request.length is not None
    takes_maximum, captured = request.algorithm == "max", reference.bind(request)
    step = delayed_scaling.advance(
        request.states,
        request.length,
        request.columns,
        takes_maximum,
        request.keep_idle,
        request.fp8_max,
        request.margin,
    )

    def advance(histories: Sequence[Tensor], scales: Sequence[Tensor]) -> None:
        device = histories[0].device
        table = _cached_table(histories, scales)
        if table is None:
            # A capture cannot take a table from the host; the same step in torch's operations can be captured.
            captured(histories, scales)
            return
        if is_current_device(device.index):
            launch.start(step, (table,), device.index)
            return
        with torch.cuda.device(device):
            launch.start(step, (table,), device.index)

    return advance


def _cached_table(histories: Sequence[Tensor], scales: Sequence[Tensor]) -> Tensor | None:
    """Return the table of the states on their device; None if it is not cached while a graph is captured."""
    addresses = tuple(
        [(h.data_ptr(), s.data_ptr(), h.shape[1]) for h, s in zip(histories, scales, strict=True)]
    )
    return _tables.get((histories[0].device, addresses), histories[0].device)


_Addresses = tuple[tuple[int, int, int], ...]


def _build_table(key: tuple[torch.device, _Addresses]) -> Tensor:
    device, addresses = key
    return torch.tensor(addresses, dtype=torch.int64, device="cpu").to(device)


# Addresses and widths determine a table, so that an entry is never stale.
_KEPT = 64
_tables: DeviceTables[tuple[torch.device, _Addresses], Tensor] = DeviceTables(_build_table, _KEPT)


BACKEND = Backend[ScaleUpdateRequest]("triton", unsupported_reason=unsupported_reason, bind=bind)
