"""Work written down once and done again: what CUDA graphs are to the rest of the package.

A `Recorder` runs a body and keeps what the device did; the `Recording` does that again, on the same memory, without
Python. The body's results stay where they were written. Tests schedule on a recorder that runs the body again.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

Results = Sequence[Tensor | None]


class Recording(Protocol):
    """What was recorded. `results` are the body's, overwritten by every replay."""

    @property
    def results(self) -> Results: ...

    def replay(self, stream: Any = None, event: Any = None) -> None: ...

    def reset(self) -> None: ...


class Recorder(Protocol):
    """Records bodies that are replayed in the order in which they are recorded.

    warming   round everything that runs before the first recording
    record    run the body once, without effect where recording is no running
    """

    def warming(self) -> AbstractContextManager[None]: ...

    def record(self, body: Callable[[], Results]) -> Recording: ...


class _State:
    capturing = False


_state = _State()


def set_capture_start() -> None:
    """Say that graphs are being captured, until `set_capture_end`."""
    _state.capturing = True


def set_capture_end() -> None:
    """Say that no graphs are being captured."""
    _state.capturing = False


def is_graph_capturing() -> bool:
    """Has somebody said that graphs are being captured?"""
    return _state.capturing


class CudaRecording:
    """A CUDA graph and the tensors that it writes."""

    def __init__(self, graph: torch.cuda.CUDAGraph, results: Results):
        self.graph = graph
        self.results = results

    def replay(self, stream: Any = None, event: Any = None) -> None:
        """On the current stream; or on the given one, which the current one waits for."""
        here = torch.cuda.current_stream()
        if stream is None or stream == here:
            self.graph.replay()
            return
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            self.graph.replay()
            event = torch.cuda.Event() if event is None else event
            event.record(stream)
        here.wait_event(event)

    def reset(self) -> None:
        self.graph.reset()
        self.results = ()


_INVALIDATED = (
    "a CUDA graph was not captured, because something beside the captured stream took part: work of another thread, or "
    "in a backward a parameter's gradient accumulator that lives on the default stream, where a wrapper such as "
    "DistributedDataParallel keeps it since it was made; make the wrapper under torch.cuda.stream(torch.cuda.Stream())"
)


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One for all recorders of a device: libraries keep a workspace for each stream that they have run on."""
    return torch.cuda.Stream(device)


class CudaRecorder:
    """Records CUDA graphs that share a pool of memory.

    pool         as torch.cuda.graph_pool_handle() gives it; None: a new one
    generators   random states, beside torch's own, that bodies draw from
    """

    def __init__(self, pool: Any = None, generators: Sequence[torch.Generator] = ()):
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self.generators = generators
        self.stream = _capture_stream(torch.cuda.current_device())

    @contextmanager
    def warming(self) -> Iterator[None]:
        torch.cuda.synchronize()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)
        torch.cuda.synchronize()

    def record(self, body: Callable[[], Results]) -> CudaRecording:
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        # Other threads, a loader that pins memory for example, may call CUDA meanwhile.
        recording = torch.cuda.graph(
            graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
        )
        here = torch.cuda.current_stream()
        try:
            with _without_collection(), recording:
                results = body()
        except BaseException as error:
            torch.cuda.set_stream(here)
            self._leave_capture()
            if isinstance(error, RuntimeError) and "during capture" in str(error):
                raise RuntimeError(_INVALIDATED) from error
            raise
        return CudaRecording(graph, results)

    def _leave_capture(self) -> None:
        """Let random states go on after a capture that failed.

        torch tells them that a capture has ended only where it ended well; until then they refuse to draw. So another
        one ends well.
        """
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            torch.zeros(1, device="cuda")


@contextmanager
def _without_collection() -> Iterator[None]:
    """A collected tensor would give its memory back to a pool that is being recorded from."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def unowned(values: Tensor) -> Tensor:
    """A tensor on the same memory that does not keep it: of a pool that something else keeps."""
    storage = torch._C._construct_storage_from_data_pointer(  # pyright: ignore[reportAttributeAccessIssue]
        values.untyped_storage().data_ptr(), values.device, values.untyped_storage().nbytes()
    )
    made = torch.empty(0, dtype=values.dtype, device=values.device)
    return made.set_(storage, values.storage_offset(), values.size(), values.stride())
