"""A stand-in for the link between device and host on machines without a GPU; it records requests and counts bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RecordedLink:
    """Treats plain CPU tensors as device tensors, and the buffers that it allocates as host tensors.

    A tensor that is copied back holds noise until `wait` is called.

    log       requests in order
    copied    bytes copied to the host
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
    """A `RecordedLink` that simulates step time: computation and copies run in order, with waits.

    now    computation time, which the caller advances
    free   time at which the link has finished all requested copies
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
        self.free = self._done[moment] = (
            max(self.free, after) + values.nbytes * self._seconds_a_byte
        )
        return moment
