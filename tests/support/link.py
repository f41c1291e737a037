"""A link between "device" and host for machines that have neither: it writes down what is asked of it, and counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RecordedLink:
    """Every plain tensor of the CPU counts as one of the device; a host tensor is one that this link has made.

    What comes back holds noise until somebody waits for it.

    log       what was asked for, in order
    copied    bytes that went to the host
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.copied = 0
        self._time = 0
        self._coming: dict[int, tuple[Tensor, Tensor]] = {}

    def takes(self, values: Tensor) -> bool:
        return values.device.type == "cpu"

    def mark(self) -> int:
        self._time += 1
        return self._time

    def to_host(self, values: Tensor, buffer: Tensor, after: Any) -> int:
        assert isinstance(after, int), "copied before the values were there"
        buffer.copy_(values)
        self.copied += values.nbytes
        self.log.append("out")
        return self.mark()

    def to_device(self, buffer: Tensor, device: torch.device) -> tuple[Tensor, int]:
        values = torch.empty_like(buffer)
        values.view(torch.uint8).random_(0, 128)
        self.log.append("back")
        moment = self.mark()
        self._coming[moment] = values, buffer.clone()
        return values, moment

    def wait(self, moment: Any) -> None:
        assert isinstance(moment, int)
        self.log.append("wait")
        if moment in self._coming:
            values, arriving = self._coming.pop(moment)
            values.copy_(arriving)

    def buffer(self, values: Tensor) -> Tensor:
        self.log.append("buffer")
        return torch.empty_like(values)


class TimedLink(RecordedLink):
    """The same with clocks: how long a step takes that computes and copies, each in its order, waits included.

    now    the computation's clock; whoever computes adds to it
    free   when the link has made all copies that it was asked for
    """

    def __init__(self, seconds_a_byte: float) -> None:
        super().__init__()
        self.now = self.free = 0.0
        self._seconds_a_byte = seconds_a_byte
        self._done: dict[int, float] = {}

    def mark(self) -> int:
        moment = super().mark()
        self._done[moment] = self.now
        return moment

    def to_host(self, values: Tensor, buffer: Tensor, after: Any) -> int:
        return self._copied(super().to_host(values, buffer, after), values, self._done[after])

    def to_device(self, buffer: Tensor, device: torch.device) -> tuple[Tensor, int]:
        values, moment = super().to_device(buffer, device)
        return values, self._copied(moment, values, self.now)

    def wait(self, moment: Any) -> None:
        super().wait(moment)
        self.now = max(self.now, self._done[moment])

    def _copied(self, moment: int, values: Tensor, after: float) -> int:
        self.free = self._done[moment] = max(self.free, after) + values.nbytes * self._seconds_a_byte
        return moment
