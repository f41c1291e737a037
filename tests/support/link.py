"""A link between "device" and host for machines that have neither: it writes down what is asked of it, and counts."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor


class RecordedLink:
    """Every plain tensor of the CPU counts as one of the device; a host tensor is one that this link has made.

    log       what was asked for, in order
    on_device bytes of tensors that were copied, or are copied back, and are alive
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.on_device = 0
        self.peak = 0
        self.copied = 0
        self._host: weakref.WeakSet[Any] = weakref.WeakSet()
        self._time = 0

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
        values = buffer.clone()
        self.log.append("back")
        return values, self.mark()

    def wait(self, moment: Any) -> None:
        assert isinstance(moment, int)
        self.log.append("wait")

    def buffer(self, values: Tensor) -> Tensor:
        self.log.append("buffer")
        return torch.empty_like(values)
