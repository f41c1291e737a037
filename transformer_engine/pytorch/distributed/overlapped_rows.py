"""Products that overlap with their own collective: copy engines move rows of one rank while those of another multiply.

Every rank has two buffers that the other ranks can read. Each use takes the other buffer.

| | gather, then product | product, then reduce-scatter |
| --- | --- | --- |
| 1 | copy the own rows to the buffer | multiply the rows of another rank, into the buffer |
| 2 | barrier | barrier |
| 3 | copy the rows of others, on a second stream | copy the own rows of others' products, on a second stream |
| meanwhile | multiply the own rows, then those of each rank that arrived | multiply the own rows; add |

A rank writes to a buffer that the others read two uses ago. They have copied it since: each waits for its copies before
it enters the barrier of the next use. Copies need no multiprocessors, unlike the kernels of a process group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .symmetric_memory import Peers

_ALIGNMENT = 256  # of the parts of a buffer, in bytes


class Copies:
    """The buffers of this rank, those of its peers, and the stream on which they are copied.

    Args:
        buffers: Two buffers of bytes, each with its peers.
        stream: Stream of the copies; None on a CPU.
    """

    def __init__(self, buffers: Sequence[tuple[Tensor, Peers]], stream: Any):
        self._buffers, self._stream = tuple(buffers), stream
        self._turn = 0
        self._joined: int | None = None  # the stream that has waited for all copies
        values, peers = buffers[0]
        self.rank, self.ranks, self.capacity = peers.rank, peers.world_size, values.numel()

    def next_buffer(self, current: Any) -> tuple[Tensor, Peers]:
        """Return the buffer of this use, which no rank reads any more.

        Args:
            current: The current stream, from `current_stream`.
        """
        buffer, peers = self._buffers[self._turn]
        self._turn = 1 - self._turn
        if current is not None and torch.cuda.is_current_stream_capturing():
            self.barrier(peers, current)  # replays may use one buffer twice in a row
        return buffer, peers

    def current_stream(self) -> Any:
        """Return the current stream; None on a CPU."""
        return None if self._stream is None else torch.cuda.current_stream()

    def barrier(self, peers: Peers, current: Any) -> None:
        """Let the current stream wait for the copies of this rank, and then for all ranks."""
        self.join(current)
        peers.barrier()

    def join(self, current: Any) -> None:
        """Let the current stream wait for the copies of this rank."""
        if current is not None and self._joined != current.cuda_stream:
            # The first wait makes the stream a part of the graph that is captured, if there is one.
            self._stream.wait_stream(current)
            current.wait_stream(self._stream)
            self._joined = current.cuda_stream

    def copying(self, current: Any) -> Any:
        """Return the context of copies that begin after the work of the current stream."""
        if current is None:
            return nullcontext()
        self._joined = None
        self._stream.wait_stream(current)
        return torch.cuda.stream(self._stream)

    def mark(self) -> Any:
        """Return the event of the copies so far."""
        return None if self._stream is None else self._stream.record_event()


def wait_for(event: Any) -> None:
    """Let the current stream wait for copies."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


class PendingRows:
    """Base of results that copies write. One that is dropped makes the stream wait before its memory is used again."""

    _complete = False

    def __init__(self, copies: Copies) -> None:
        self._copies = copies

    def __del__(self) -> None:
        if not self._complete and not sys.is_finalizing():
            self._copies.join(self._copies.current_stream())


class GatheredRows(PendingRows):
    """Rows of all ranks, which arrive rank by rank.

    Args:
        copies: The buffers.
        parts: Tensors of this rank whose first dimensions are gathered, such as codes and scales.
        join: Returns the matrix of such tensors.
    """

    def __init__(self, copies: Copies, parts: Sequence[Tensor], join: Callable[[Sequence[Tensor]], Any]):
        super().__init__(copies)
        self.rank, self.ranks, self._join = copies.rank, copies.ranks, join
        self._own = parts
        contiguous = [part.contiguous() for part in parts]
        current = copies.current_stream()
        buffer, peers = copies.next_buffer(current)
        sent = [part.view(-1).view(torch.uint8) for part in contiguous]
        starts = _starts(sent)
        for part, start in zip(sent, starts, strict=True):
            buffer[start : start + part.numel()].copy_(part)
        copies.barrier(peers, current)
        self._whole = [part.new_empty((self.ranks * part.shape[0], *part.shape[1:])) for part in contiguous]
        received = [whole.view(-1).view(torch.uint8) for whole in self._whole]
        self._arrivals: dict[int, Any] = {}
        with copies.copying(current):
            for rank in self.order()[1:]:
                for target, part, start in zip(received, sent, starts, strict=True):
                    source = peers.get_buffer(rank, (part.numel(),), torch.uint8, start)
                    target[rank * part.numel() : (rank + 1) * part.numel()].copy_(source)
                self._arrivals[rank] = copies.mark()
            for target, part in zip(received, sent, strict=True):
                target[self.rank * part.numel() : (self.rank + 1) * part.numel()].copy_(part)
            self._arrivals[self.rank] = copies.mark()

    def order(self) -> list[int]:
        """Return the ranks in the order in which their rows arrive, this one first."""
        return [(self.rank + step) % self.ranks for step in range(self.ranks)]

    def rows_of(self, rank: int) -> Any:
        """Return the rows of a rank, complete for the current stream."""
        if rank == self.rank:
            return self._join(self._own)
        wait_for(self._arrivals[rank])
        parts = [
            whole[rank * own.shape[0] : (rank + 1) * own.shape[0]]
            for whole, own in zip(self._whole, self._own, strict=True)
        ]
        return self._join(parts)

    def wait(self) -> Any:
        """Return the rows of all ranks, complete for the current stream."""
        wait_for(self._arrivals[self.rank])  # the last to be copied
        self._complete = True
        return self._join(self._whole)


def _starts(parts: Sequence[Tensor]) -> list[int]:
    """Return where each part of a message begins in a buffer."""
    starts, end = [], 0
    for part in parts:
        starts.append(end)
        end += -(-part.numel() // _ALIGNMENT) * _ALIGNMENT
    return starts


def message_size(parts: Sequence[Tensor]) -> int:
    """Return the bytes that tensors need in a buffer."""
    return sum([-(-part.numel() * part.element_size() // _ALIGNMENT) * _ALIGNMENT for part in parts])


class ScatteredRows(PendingRows):
    """The sum over the ranks of this rank's rows of a product, while it is on its way.

    Args:
        copies: The buffers.
        shape: Shape [m, N] of the rows of one rank.
        dtype: Dtype of the product and of the sum.
        device: Device of the product.
        multiply: multiply(rank, out) writes the rows of a rank to out [m, N].
    """

    def __init__(
        self,
        copies: Copies,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        multiply: Callable[[int, Tensor], object],
    ):
        super().__init__(copies)
        current = copies.current_stream()
        buffer, peers = copies.next_buffer(current)
        size = shape[0] * shape[1] * dtype.itemsize
        self._others = [torch.empty(shape, dtype=dtype, device=device) for _ in range(copies.ranks - 1)]
        for place, received in enumerate(self._others):
            step = place + 1
            part = buffer[place * size : (place + 1) * size].view(dtype).view(shape)
            multiply((copies.rank + step) % copies.ranks, part)
            copies.barrier(peers, current)
            with copies.copying(current):
                source = peers.get_buffer(
                    (copies.rank - step) % copies.ranks, (size,), torch.uint8, place * size
                )
                received.view(-1).view(torch.uint8).copy_(source)
                self._copied = copies.mark()
        self._own = torch.empty(shape, dtype=dtype, device=device)
        multiply(copies.rank, self._own)

    def wait(self) -> Tensor:
        """Return the sum [m, N], rounded once, complete for the current stream."""
        wait_for(self._copied)
        self._complete = True
        if len(self._others) == 1:
            return self._own.add_(self._others[0])
        total = self._own.to(torch.float32, copy=True)
        for other in self._others:
            total += other
        return total.to(self._own.dtype)
