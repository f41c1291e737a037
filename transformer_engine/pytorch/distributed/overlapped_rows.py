"""Products that overlap with their own collective: rows travel between GPUs while others multiply.

Every rank has two buffers that the other ranks can read and write. Consecutive collectives alternate between them.

| | gather, then product | product, then reduce-scatter |
| --- | --- | --- |
| 1 | copy this rank's rows to its buffer | multiply the rows of each other rank, into that rank's buffer |
| 2 | barrier | multiply this rank's rows |
| 3 | on a second stream, copy the rows of other ranks | barrier |
| 4 | during the copies, multiply this rank's rows and then each other rank's | add the rows in this rank's buffer |

Gathers use copy engines, and products store their results directly in peer memory, whereas the kernels of a
process group occupy multiprocessors. `wait` runs the barrier of a reduce-scatter, so that a rank that is
ahead does other work first. If the next collective starts before, it calls `wait`.

Before a buffer is overwritten, all ranks have finished reading it: each waits for its copies, and has added its
rows, before the barrier of the next collective. Replays of graphs and other collectives may use one buffer twice in
a row. The first collective in a CUDA graph therefore begins with a barrier, as does every collective outside of a
graph once the group has been captured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common.formats import round_up
from ..runtime.capture import capture_number
from ..runtime.launching import run, unsupported_elementwise
from .symmetric_memory import Peers

_ALIGNMENT = 256  # of the parts of a message, in bytes
_MAX_CACHED_LAYOUTS = 64  # of messages, per buffer
# After this time a barrier fails because a rank does not take part. NCCL waits as long by default.
_BARRIER_MS = 600_000

Layout = tuple[tuple[torch.Size, torch.dtype], ...]  # message part shapes and dtypes


class _Message(NamedTuple):
    """Parts of a message in the buffers of all ranks.

    Attributes:
        own: The parts in this rank's buffer.
        of_rank: The parts in the buffers of other ranks.
    """

    own: list[Tensor]
    of_rank: dict[int, list[Tensor]]


class SharedBuffer:
    """This rank's buffer, which its peers read and write, and the peers' buffers.

    Args:
        values: Bytes of this rank.
        peers: The buffers of all ranks.
    """

    def __init__(self, values: Tensor, peers: Peers):
        self.values, self.peers = values, peers
        self._messages: dict[Layout, _Message] = {}

    def message(self, layout: Layout) -> _Message:
        """Return the parts of a message in this layout. Buffer views are cached for the next message."""
        cached = self._messages.get(layout)
        if cached is None:
            if len(self._messages) >= _MAX_CACHED_LAYOUTS:
                self._messages.clear()
            # other modes cannot write to views made in inference mode
            with torch.inference_mode(False):
                cached = self._messages[layout] = self._views(layout)
        return cached

    def _views(self, layout: Layout) -> _Message:
        local: list[Tensor] = []
        remote = {rank: [] for rank in range(self.peers.world_size) if rank != self.peers.rank}
        start = 0
        for shape, dtype in layout:
            size = shape.numel() * dtype.itemsize
            local.append(self.values[start : start + size].view(dtype).view(shape))
            for rank, parts in remote.items():
                part = self.peers.get_buffer(rank, (size,), torch.uint8, start)
                parts.append(part.view(dtype).view(shape))
            start += round_up(size, _ALIGNMENT)
        return _Message(local, remote)


def message_bytes(layout: Layout) -> int:
    """Return the bytes that a message needs in a buffer."""
    return sum([round_up(shape.numel() * dtype.itemsize, _ALIGNMENT) for shape, dtype in layout])


class PeerBuffers:
    """This rank's buffers, its peers' buffers, and the stream on which they are copied.

    Args:
        buffers: Two byte buffers, each with its peers.
        stream: Copy stream; None on a CPU.
    """

    def __init__(self, buffers: Sequence[tuple[Tensor, Peers]], stream: Any):
        self._buffers, self._stream = tuple([SharedBuffer(*pair) for pair in buffers]), stream
        self._turn = 0
        self._stream_after_copies: int | None = None  # the stream that has waited for all copies
        self._last_copy_event: Any = None  # recorded after the last copy
        self._last_stream: Any = None  # of the last collective
        self._capture: int | None = None  # number of the last capture
        self._was_captured = False
        self.unfinished: ScatteredRows | None = None
        values, peers = buffers[0]
        self.rank, self.ranks, self.capacity = peers.rank, peers.world_size, values.numel()

    def next_buffer(self, current: Any) -> SharedBuffer:
        """Return the buffer of the next collective, which no rank is still reading.

        Args:
            current: The current stream, from `current_stream`.
        """
        captured = is_captured(current)
        self.follow(current)
        unfinished, self.unfinished = self.unfinished, None
        # Work from before a capture, or from a capture that failed, does not belong to this one.
        if unfinished is not None and unfinished.captured == captured:
            unfinished.wait()
        buffer = self._buffers[self._turn]
        self._turn = 1 - self._turn
        if self._may_be_in_use(current, captured):
            self.barrier(buffer, current)
        return buffer

    def _may_be_in_use(self, current: Any, captured: bool) -> bool:
        """Return whether a rank may still use the buffers in a way that the alternation does not exclude."""
        if not captured:
            return self._was_captured
        last, self._capture = self._capture, capture_number(current)
        self._was_captured = True
        return self._capture is None or self._capture != last

    def follow(self, current: Any) -> None:
        """Let the current stream wait for the stream of the last collective, if that is another one."""
        if (
            self._last_stream is not None
            and current != self._last_stream
            and not is_captured(current)
        ):
            current.wait_stream(self._last_stream)
        self._last_stream = current

    def current_stream(self) -> Any:
        """Return the current stream of the device; None on a CPU."""
        return None if self._stream is None else torch.cuda.current_stream(self._stream.device)

    def barrier(self, buffer: SharedBuffer, current: Any) -> None:
        """Let the current stream wait for the copies of this rank, and then for all ranks."""
        self.wait_for_copies(current)
        buffer.peers.barrier(timeout_ms=_BARRIER_MS)

    def wait_for_copies(self, current: Any) -> None:
        """Let the current stream wait for all copies on this rank."""
        if current is not None and self._stream_after_copies != current.cuda_stream:
            # The first wait adds the stream to the graph that is captured, if there is one.
            self._stream.wait_stream(current)
            current.wait_stream(self._stream)
            self._stream_after_copies = current.cuda_stream

    def copying(self, current: Any) -> Any:
        """Return a context for copies that begin after the work on the current stream."""
        if current is None:
            return nullcontext()
        self._stream_after_copies = None
        self._stream.wait_stream(current)
        return torch.cuda.stream(self._stream)

    def record_event(self) -> Any:
        """Return an event recorded after the last copy; None on a CPU."""
        self._last_copy_event = None if self._stream is None else self._stream.record_event()
        return self._last_copy_event

    def wait_for(self, event: Any, current: Any) -> None:
        """Let the current stream wait for an event from `record_event`."""
        if event is not None:
            current.wait_event(event)
            if event is self._last_copy_event:
                self._stream_after_copies = current.cuda_stream


def is_captured(current: Any) -> bool:
    """Return whether work on a stream is being captured in a CUDA graph."""
    return current is not None and torch.cuda.is_current_stream_capturing()


class GatheredRows:
    """Rows of all ranks, which arrive rank by rank.

    If the object is deleted before `wait`, the current stream waits for its copies.

    Args:
        buffers: The buffers.
        parts: Tensors of this rank whose first dimensions are gathered, such as codes and scales.
        layout: Their shapes and dtypes.
        rebuild: Returns the matrix for such tensors.
    """

    _complete = True  # until copies begin

    def __init__(
        self,
        buffers: PeerBuffers,
        parts: Sequence[Tensor],
        layout: Layout,
        rebuild: Callable[[Sequence[Tensor]], Any],
    ):
        self._buffers, current = buffers, buffers.current_stream()
        self._buffer = buffers.next_buffer(current)
        self.rank, self.ranks, self._rebuild = buffers.rank, buffers.ranks, rebuild
        self._own, message = parts, self._buffer.message(layout)
        for sent, part in zip(message.own, parts, strict=True):
            sent.copy_(part)
        buffers.barrier(self._buffer, current)
        self._stacked = [
            torch.empty((self.ranks, *shape), dtype=dtype, device=message.own[0].device)
            for shape, dtype in layout
        ]
        rows = [stacked.unbind() for stacked in self._stacked]
        self._rows = list(zip(*rows, strict=True))
        self._arrivals: dict[int, Any] = {}
        self._complete = False
        with buffers.copying(current):
            for rank in (*self.order()[1:], self.rank):
                sources = message.own if rank == self.rank else message.of_rank[rank]
                for target, source in zip(self._rows[rank], sources, strict=True):
                    target.copy_(source)
                self._arrivals[rank] = buffers.record_event()

    def __del__(self) -> None:
        if not self._complete and not sys.is_finalizing():
            current = self._buffers.current_stream()
            self._buffers.wait_for_copies(current)

    def order(self) -> list[int]:
        """Return the ranks in the order in which their rows arrive, this one first."""
        return [(self.rank + step) % self.ranks for step in range(self.ranks)]

    def rows_of(self, rank: int) -> Any:
        """Return the rows of a rank, complete for the current stream."""
        if rank == self.rank:
            return self._rebuild(self._own)
        self._buffers.wait_for(self._arrivals[rank], self._buffers.current_stream())
        return self._rebuild(self._rows[rank])

    def wait(self) -> Any:
        """Return the rows of all ranks, complete for the current stream."""
        current = self._buffers.current_stream()
        self._buffers.wait_for(self._arrivals[self.rank], current)  # the last to be copied
        self._complete = True
        return self._rebuild([stacked.flatten(0, 1) for stacked in self._stacked])


class ScatteredRows:
    """Pending sum over the ranks for this rank's rows in a product.

    Args:
        buffers: The buffers.
        layout: One rank's row shape [m, N] and the dtype of the product and sum, `ranks - 1` times.
            Part p of this rank's buffer receives its rows from rank (rank - p - 1) % ranks.
        multiply: multiply(rank, out) writes the rows of a rank to out [m, N].

    Attributes:
        captured: The product is part of a CUDA graph.
    """

    def __init__(
        self, buffers: PeerBuffers, layout: Layout, multiply: Callable[[int, Tensor], object]
    ):
        self._buffers = buffers
        self._sum: Tensor | None = None
        current = buffers.current_stream()
        self.captured = is_captured(current)
        self._buffer = buffers.next_buffer(current)
        message = self._buffer.message(layout)
        self._received = message.own
        for part in range(buffers.ranks - 1):
            rank = (buffers.rank + part + 1) % buffers.ranks
            multiply(rank, message.of_rank[rank][part])
        self._own = torch.empty_like(message.own[0])
        multiply(buffers.rank, self._own)
        buffers.unfinished = self

    def wait(self) -> Tensor:
        """Return the sum [m, N], rounded once, complete for the current stream."""
        current = self._buffers.current_stream()
        self._buffers.follow(current)
        if self._sum is None:
            self._buffers.barrier(self._buffer, current)
            self._sum = self._add_parts()
            if self._buffers.unfinished is self:
                self._buffers.unfinished = None
        return self._sum

    def _add_parts(self) -> Tensor:
        if len(self._received) == 1:
            return self._own.add_(self._received[0])
        return add_parts(self._own, self._received)


def add_parts(total: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Add parts to a tensor, in order, in float32, and round the sum once; the tensor may be overwritten.

    Args:
        total: First summand.
        parts: The other summands, with total's shape and dtype, at equal distances in one buffer.
    """
    if total.is_cuda and unsupported_elementwise(total.device) is None:
        from ...common.kernels.part_sums import part_sums

        stride = (parts[1].data_ptr() - parts[0].data_ptr()) // total.itemsize
        run(part_sums(total.numel(), stride, len(parts)), (total, parts[0]))
        return total
    wide = total.to(torch.float32, copy=True)
    for other in parts:
        wide += other
    return wide.to(total.dtype)
