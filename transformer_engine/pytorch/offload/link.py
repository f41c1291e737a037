"""Copies between GPU and host memory that overlap with the computation.

A `Link` is the interface from offloading to the hardware, with copies in call order. `CudaLink`
copies on a separate stream; `NoLink`, for a machine without a GPU, accepts no tensor, so that
nothing is copied. Tests use a link that records its calls. The methods are:

* `takes(values)`: whether a tensor is on the device.
* `mark()`: the present moment of the computation, for which `to_host` waits; later moments are greater.
* `to_host(values, buffer, after)`: copy values into a host buffer after a moment; return the moment at which the copy
  is complete.
* `to_device(buffer, device)`: (new tensor with the values of a host buffer, moment at which they are complete).
* `wait(moment)`: make the computation wait for a link moment.
* `buffer(values)`: a new host buffer for these values.
"""

from __future__ import annotations

from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Moment(NamedTuple):
    """A point in the computing stream; later points have greater numbers."""

    number: int
    event: Any


_numbers = count()


class CudaLink:
    """Copies on one stream, the given one or a new one, in call order."""

    def __init__(self, stream: torch.cuda.Stream | None = None):
        self.stream = torch.cuda.Stream() if stream is None else stream

    def takes(self, values: Tensor) -> bool:
        return values.is_cuda

    def mark(self) -> Moment:
        return Moment(next(_numbers), torch.cuda.current_stream().record_event())

    def to_host(self, values: Tensor, buffer: Tensor, after: Moment) -> Any:
        self.stream.wait_event(after.event)
        with torch.cuda.stream(self.stream):
            buffer.copy_(values, non_blocking=True)
            return self.stream.record_event()

    def to_device(self, buffer: Tensor, device: torch.device) -> tuple[Tensor, Any]:
        # Allocated on the computing stream, which frees it: the link must wait for the block's earlier reader.
        values = torch.empty_like(buffer, device=device, pin_memory=False)
        self.stream.wait_event(self.mark().event)
        with torch.cuda.stream(self.stream):
            values.copy_(buffer, non_blocking=True)
            return values, self.stream.record_event()

    def wait(self, moment: Any) -> None:
        torch.cuda.current_stream().wait_event(moment)

    def buffer(self, values: Tensor) -> Tensor:
        return torch.empty_like(values, device="cpu", pin_memory=True)


class NoLink:
    """The link for a machine without a GPU, which copies nothing."""

    def takes(self, values: Tensor) -> bool:
        return False

    def mark(self) -> None:
        return None

    def to_host(self, values: Tensor, buffer: Tensor, after: Any) -> None:
        buffer.copy_(values)

    def to_device(self, buffer: Tensor, device: torch.device) -> tuple[Tensor, None]:
        return buffer.to(device), None

    def wait(self, moment: Any) -> None:
        return None

    def buffer(self, values: Tensor) -> Tensor:
        return torch.empty_like(values, device="cpu")


Link = CudaLink | NoLink
