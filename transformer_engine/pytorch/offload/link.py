"""host [n] <- device [n] and back, beside the computation: the way between a GPU's memory and the host's.

A `Link` is all that the schedule of offloading needs of hardware. `CudaLink` copies on a stream of its own; `NoLink`,
of a machine without a GPU, takes no tensor, so that nothing moves. Tests schedule on a link that records its calls.
"""

from __future__ import annotations

from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Link(Protocol):
    """One direction at a time, in the order of the calls.

    takes      does this tensor lie where copies begin?
    mark       a moment of the computation, for `to_host` to wait for; a later one is greater
    to_host    copy values into a host buffer, once the moment `after` has passed; returns the moment it is done
    to_device  (a new tensor with the host's values, the moment at which it has them)
    wait       let the computation go on only when a moment of the link has passed
    buffer     a host buffer for values like these
    """

    def takes(self, values: Tensor) -> bool: ...

    def mark(self) -> Any: ...

    def to_host(self, values: Tensor, buffer: Tensor, after: Any) -> Any: ...

    def to_device(self, buffer: Tensor, device: torch.device) -> tuple[Tensor, Any]: ...

    def wait(self, moment: Any) -> None: ...

    def buffer(self, values: Tensor) -> Tensor: ...


class Moment(NamedTuple):
    """A point of the computing stream; numbers grow from one to the next."""

    number: int
    event: Any


_numbers = count()


class CudaLink:
    """Copies on one stream, the given one or a new one, so that a layer's copies are done in their order."""

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
        # Allocated on the computing stream, which will free it: the link has to wait for the block's earlier reader.
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
    """There is nothing to copy from: every tensor lies in host memory already."""

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
