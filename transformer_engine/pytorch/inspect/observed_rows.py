"""Statistics rows, one per tensor and module, on the devices of the tensors; read once per step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..primitives.operand import Operand
from ..primitives.statistics import FIELDS, take_in_statistics
from .observation_report import TensorReport

_CHUNK = 256  # rows that are allocated at a time


@dataclass
class _DeviceRows:
    """Rows on one device, in chunks, and the number of rows in use."""

    chunks: list[Tensor] = field(default_factory=list)
    taken: int = 0


@dataclass
class _TensorRow:
    row: Tensor
    place: tuple[torch.device, int]
    format: str | None = None
    elements: int = 0


class TakenRows(NamedTuple):
    """Rows of a step on their devices, and their tensors."""

    held: dict[torch.device, Tensor]
    slots: list[tuple[tuple[str, str], _TensorRow]]

    def read(self) -> tuple[TensorReport, ...]:
        """Read the reports; only this call waits for the devices."""
        values = {device: rows.tolist() for device, rows in self.held.items()}
        return tuple(
            _report(*key, slot, values[slot.place[0]][slot.place[1]]) for key, slot in self.slots
        )


@dataclass(eq=False)
class ObservedRows:
    """{(module, tensor): row}, in the order in which a step first saw them."""

    _slots: dict[tuple[str, str], _TensorRow] = field(default_factory=dict)
    _order: dict[tuple[str, str], None] = field(default_factory=dict)
    _devices: dict[torch.device, _DeviceRows] = field(default_factory=dict)

    def add_rows(self, module: str, tensor: str, x: Tensor, operand: Operand | None) -> None:
        """Add the statistics of x [M, K] and its codes to the tensor's statistics in this step."""
        key = (module, tensor)
        slot = self._slots.get(key)
        if slot is None or slot.place[0] != x.device:
            slot = self._slots[key] = self._new(x.device)
        self._order.setdefault(key)
        slot.elements += x.numel()
        if operand is not None:
            slot.format = None
            if operand.format is not None:
                name = str(operand.codes.dtype).removeprefix("torch.float8_").removesuffix("fn")
                slot.format = f"{'e2m1' if operand.codes.dtype == torch.uint8 else name} {operand.format.name}"
        with torch.no_grad():
            take_in_statistics(x, operand, slot.row)

    def take_out(self) -> TakenRows:
        """Return a copy of the rows of the step, made in stream order."""
        values = {
            device: torch.cat(rows.chunks) for device, rows in self._devices.items() if rows.chunks
        }
        return TakenRows(values, [(key, replace(self._slots[key])) for key in self._order])

    def clear(self) -> None:
        """Begin a step."""
        self._order.clear()
        for rows in self._devices.values():
            for chunk in rows.chunks:
                chunk.zero_()
        for slot in self._slots.values():
            slot.elements, slot.format = 0, None

    def _new(self, device: torch.device) -> _TensorRow:
        rows = self._devices.setdefault(device, _DeviceRows())
        number = rows.taken
        if number % _CHUNK == 0:
            with torch.inference_mode(False):
                rows.chunks.append(
                    torch.zeros(_CHUNK, len(FIELDS), dtype=torch.float64, device=device)
                )
        rows.taken += 1
        return _TensorRow(rows.chunks[-1][number % _CHUNK], (device, number))


def _report(module: str, tensor: str, slot: _TensorRow, row: list[float]) -> TensorReport:
    values = dict(zip(FIELDS, row, strict=True))
    elements = max(1, slot.elements)
    sqnr = None  # in decibels
    if slot.format is not None:
        signal, noise = values["signal"], values["noise"]
        sqnr = (
            math.inf
            if noise == 0.0
            else 10.0 * math.log10(signal / noise)
            if signal > 0.0
            else -math.inf
        )
    return TensorReport(
        module,
        tensor,
        slot.format,
        slot.elements,
        values["maximum"],
        values["underflow"] / elements,
        values["saturation"] / elements,
        sqnr,
        int(values["nonfinite"]),
    )
