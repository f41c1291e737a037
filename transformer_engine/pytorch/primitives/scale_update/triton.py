"""The step on a GPU: one launch for all states, which it finds through a table of addresses on the device."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ....common.kernels import launch
from ....common.kernels.launch import Launch
from . import reference
from .request import ScaleUpdateRequest

_LIMIT = 1 << 15  # delayed_scaling.LIMIT, whose module imports triton


def refuses(request: ScaleUpdateRequest) -> str | None:
    if request.device != "cuda":
        return f"it needs a CUDA device, the states are on {request.device}"
    if (reason := launch.missing()) is not None:
        return reason
    if request.length is None:
        return "the histories differ in length"
    if request.length > _LIMIT:
        return f"a history of {request.length} steps exceeds {_LIMIT}"
    return None


def run(
    histories: Sequence[Tensor],
    scales: Sequence[Tensor],
    algorithm: str,
    fp8_max: float,
    margin: int,
    keep_idle: bool,
) -> None:
    """One step for every state, in place."""
    addresses = tuple(
        [(h.data_ptr(), s.data_ptr(), h.shape[1]) for h, s in zip(histories, scales, strict=True)]
    )
    device = histories[0].device
    table = _tables.get(addresses)
    if torch.cuda.is_current_stream_capturing():
        if table is None:
            # A capture cannot take a table from the host; the same step in torch's operations can be captured.
            reference.run(histories, scales, algorithm, fp8_max, margin, keep_idle)
            return
        _captured[addresses] = table
    elif table is None:
        table = _remember(addresses, device)
    columns = max([address[2] for address in addresses])
    step = _launch(
        len(addresses), histories[0].shape[0], columns, algorithm == "max", keep_idle, fp8_max, margin
    )
    with torch.cuda.device(device):
        launch.start(step, (table,), device.index)


# Addresses and widths determine a table entirely, so a stale one is never found; the oldest are dropped.
_tables: OrderedDict[tuple[tuple[int, int, int], ...], Tensor] = OrderedDict()
_KEPT = 64
# A captured graph reads its table at every replay, which may go on when the table has been dropped above.
_captured: dict[tuple[tuple[int, int, int], ...], Tensor] = {}


def _remember(addresses: tuple[tuple[int, int, int], ...], device: torch.device) -> Tensor:
    table = torch.tensor(addresses, dtype=torch.int64).to(device)
    _tables[addresses] = table
    if len(_tables) > _KEPT:
        _tables.popitem(last=False)
    return table


@functools.lru_cache(maxsize=256)
def _launch(
    states: int, length: int, columns: int, takes_maximum: bool, keeps_idle: bool, fp8_max: float, margin: int
) -> Launch:
    from ....common.kernels import delayed_scaling  # it imports triton

    return delayed_scaling.advance(states, length, columns, takes_maximum, keeps_idle, fp8_max, margin)


BACKEND = Backend[ScaleUpdateRequest]("triton", run, refuses)
