"""Products that overlap with their own collective: copy engines transfer rows of one rank while others multiply.

Every rank has two buffers that the other ranks can read. Consecutive collectives alternate between them.

| | gather, then product | product, then reduce-scatter |
| --- | --- | --- |
| 1 | copy this rank's rows to the buffer | multiply the rows of another rank, into the buffer |
| 2 | barrier | barrier |
| 3 | copy the rows of other ranks, on a second stream | copy this rank's rows of their products, on a second stream |
| at the same time | multiply this rank's rows, then those of each rank that arrived | multiply this rank's rows; add |

Before a rank overwrites a buffer, all ranks have finished reading it: each waits for its copies before the barrier of
the next collective. Copies need no multiprocessors, unlike the kernels of a process group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ...common.formats import round_up
from .symmetric_memory import Peers

_ALIGNMENT = 256  # of the parts of a buffer, in bytes
_BARRIER_MS = (
    600_000  # after which a barrier fails because a rank does not take part, as long as NCCL waits by default
)


class PeerBuffers:
    """The buffers of this rank, those of its peers, and the stream on which they are copied.

    Args:
        buffers: Two buffers of bytes, each with its peers.
        stream: Stream of the copies; None on a CPU.
    """

    def __init__(self, buffers: Sequence[tuple[Tensor, Peers]], stream: Any):
        self._buffers, self._stream = tuple(buffers), stream
        self._turn = 0
        self._waited: int | None = None  # the stream that has waited for all copies
        values, peers = buffers[0]
        self.rank, self.ranks, self.capacity = peers.rank, peers.world_size, values.numel()

    def next_buffer(self, current: Any) -> tuple[Tensor, Peers]:
        """Return the buffer of the next collective, which no rank is still reading.

        Args:
            current: The current stream, from `current_stream`.
        """
        buffer, peers = self._buffers[self._turn]
        self._turn = 1 - self._turn
        if is_captured(current):
            self.barrier(peers, current)  # replays and other collectives may use one buffer twice in a row
        return buffer, peers

    def current_stream(self) -> Any:
        """Return the current stream of the device; None on a CPU."""
        return None if self._stream is None else torch.cuda.current_stream(self._stream.device)

    def barrier(self, peers: Peers, current: Any) -> None:
        """Let the current stream wait for the copies of this rank, and then for all ranks."""
        self.wait_for_copies(current)
        peers.barrier(timeout_ms=_BARRIER_MS)

    def wait_for_copies(self, current: Any) -> None:
        """Let the current stream wait for all copies of this rank."""
        if current is not None and self._waited != current.cuda_stream:
            # The first wait makes the stream a part of the graph that is captured, if there is one.
            self._stream.wait_stream(current)
            current.wait_stream(self._stream)
            self._waited = current.cuda_stream

    def copying(self, current: Any) -> Any:
        """Return the context of copies that begin after the work of the current stream."""
        if current is None:
            return nullcontext()
        self._waited = None
        self._stream.wait_stream(current)
        return torch.cuda.stream(self._stream)

    def record_event(self) -> Any:
        """Return an event that completes with all copies so far; None on a CPU."""
        return None if self._stream is None else self._stream.record_event()


def is_captured(current: Any) -> bool:
    """Return whether work on a stream is being captured in a CUDA graph."""
    return current is not None and torch.cuda.is_current_stream_capturing()


class PendingRows:
    """Base of results that copies write. Deleting an incomplete one makes the current stream wait for its copies."""

    _complete = False

    def __init__(self, buffers: PeerBuffers) -> None:
        self._buffers = buffers
        self._current = buffers.current_stream()
        self._buffer, self._peers = buffers.next_buffer(self._current)

    def __del__(self) -> None:
        if not self._complete and not sys.is_finalizing():
            self._buffers.wait_for_copies(self._buffers.current_stream())

    def _finish(self, event: Any) -> None:
        """Let the current stream wait for the last copy."""
        current = self._buffers.current_stream()
        wait_for(current, event)
        self._complete = True
        if is_captured(current):
            # After a replay, any rank may write to the buffer.
            self._buffers.barrier(self._peers, current)


def wait_for(current: Any, event: Any) -> None:
    """Let a stream wait for an event."""
    if event is not None:
        current.wait_event(event)


class GatheredRows(PendingRows):
    """Rows of all ranks, which arrive rank by rank.

    Args:
        buffers: The buffers.
        parts: Tensors of this rank whose first dimensions are gathered, such as codes and scales.
        rebuild: Returns the matrix of such tensors.
    """

    def __init__(
        self, buffers: PeerBuffers, parts: Sequence[Tensor], rebuild: Callable[[Sequence[Tensor]], Any]
    ):
        super().__init__(buffers)
        self.rank, self.ranks, self._rebuild = buffers.rank, buffers.ranks, rebuild
        self._own = parts
        contiguous = [part.contiguous() for part in parts]
        # Kept until the copies that read it have ended.
        self._sent = sent = [part.view(-1).view(torch.uint8) for part in contiguous]
        starts = _starts(sent)
        for part, start in zip(sent, starts, strict=True):
            self._buffer[start : start + part.numel()].copy_(part)
        buffers.barrier(self._peers, self._current)
        self._whole = [part.new_empty((self.ranks * part.shape[0], *part.shape[1:])) for part in contiguous]
        received = [whole.view(-1).view(torch.uint8) for whole in self._whole]
        self._arrivals: dict[int, Any] = {}
        with buffers.copying(self._current):
            for rank in self.order()[1:]:
                for target, part, start in zip(received, sent, starts, strict=True):
                    source = self._peers.get_buffer(rank, (part.numel(),), torch.uint8, start)
                    target[rank * part.numel() : (rank + 1) * part.numel()].copy_(source)
                self._arrivals[rank] = buffers.record_event()
            for target, part in zip(received, sent, strict=True):
                target[self.rank * part.numel() : (self.rank + 1) * part.numel()].copy_(part)
            self._arrivals[self.rank] = buffers.record_event()

    def order(self) -> list[int]:
        """Return the ranks in the order in which their rows arrive, this one first."""
        return [(self.rank + step) % self.ranks for step in range(self.ranks)]

    def rows_of(self, rank: int) -> Any:
        """Return the rows of a rank, complete for the current stream."""
        if rank == self.rank:
            return self._rebuild(self._own)
        wait_for(self._buffers.current_stream(), self._arrivals[rank])
        parts = [
            whole[rank * own.shape[0] : (rank + 1) * own.shape[0]]
            for whole, own in zip(self._whole, self._own, strict=True)
        ]
        return self._rebuild(parts)

    def wait(self) -> Any:
        """Return the rows of all ranks, complete for the current stream."""
        self._finish(self._arrivals[self.rank])  # the last to be copied
        return self._rebuild(self._whole)


def _starts(parts: Sequence[Tensor]) -> list[int]:
    """Return where each part of a message begins in a buffer."""
    starts, end = [], 0
    for part in parts:
        starts.append(end)
        end += round_up(part.numel(), _ALIGNMENT)
    return starts


def message_bytes(parts: Sequence[Tensor]) -> int:
    """Return the bytes that tensors need in a buffer."""
    return sum([round_up(part.nbytes, _ALIGNMENT) for part in parts])


class ScatteredRows(PendingRows):
    """The pending sum over the ranks of this rank's rows of a product.

    Args:
        buffers: The buffers.
        shape: Shape [m, N] of the rows of one rank.
        dtype: Dtype of the product and of the sum.
        device: Device of the product.
        multiply: multiply(rank, out) writes the rows of a rank to out [m, N].
    """

    def __init__(
        self,
        buffers: PeerBuffers,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        multiply: Callable[[int, Tensor], object],
    ):
        super().__init__(buffers)
        size = shape[0] * shape[1] * dtype.itemsize
        self._others = [torch.empty(shape, dtype=dtype, device=device) for _ in range(buffers.ranks - 1)]
        self._copied: Any = None
        for place, received in enumerate(self._others):
            step = place + 1
            part = self._buffer[place * size : (place + 1) * size].view(dtype).view(shape)
            multiply((buffers.rank + step) % buffers.ranks, part)
            buffers.barrier(self._peers, self._current)
            with buffers.copying(self._current):
                rank = (buffers.rank - step) % buffers.ranks
                source = self._peers.get_buffer(rank, (size,), torch.uint8, place * size)
                received.view(-1).view(torch.uint8).copy_(source)
                self._copied = buffers.record_event()
        self._own = torch.empty(shape, dtype=dtype, device=device)
        multiply(buffers.rank, self._own)

    def wait(self) -> Tensor:
        """Return the sum [m, N], rounded once, complete for the current stream."""
        self._finish(self._copied)
        if len(self._others) == 1:
            return self._own.add_(self._others[0])
        total = self._own.to(torch.float32, copy=True)
        for other in self._others:
            total += other
        return total.to(self._own.dtype)
