"""Recording and replay of work: the interface of the rest of the package to CUDA graphs.

A `Recorder` runs a body and records the device's work. The `Recording` repeats this work on the same memory
without Python, and its results overwrite the body's. Tests use a recorder that runs the body again.
"""

from __future__ import annotations

import ctypes
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

Results = Sequence[Tensor | None]


class Recording(Protocol):
    """Recorded work. `results` are the body's, overwritten by every replay."""

    @property
    def results(self) -> Results: ...

    def replay(self, stream: Any = None, event: Any = None) -> None: ...

    def reset(self) -> None: ...


class Recorder(Protocol):
    """Records bodies, which are replayed in recording order.

    Attributes:
        warming: Context for all code that runs before the first recording.
        capture_stream_context: Context for eager code on the stream of the recordings; the host waits for nothing.
        transfer: Keeps the memory of tensors from this code until the current stream has read them.
        record: Runs the body once; the results are invalid until the first replay if the recorder only records.
    """

    def warming(self) -> AbstractContextManager[None]: ...

    def capture_stream_context(self) -> AbstractContextManager[None]: ...

    def keep_until_read(self, tensors: Sequence[Tensor]) -> None: ...

    def record(self, body: Callable[[], Results]) -> Recording: ...


class _State:
    capturing = False


_state = _State()


@functools.cache
def _capture_info() -> Any:
    """Return the CUDA driver's function that describes the capture on a stream; None without this driver."""
    try:
        function = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError):  # another platform, or a driver without the function
        return None
    number = ctypes.POINTER(ctypes.c_uint64)
    function.argtypes = [
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_int),
        number,
        *[ctypes.c_void_p] * 3,
    ]
    function.restype = ctypes.c_int
    return function


_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE


def capture_number(stream: Any) -> int | None:
    """Return the number of the capture on a stream, unique in the process; None if it is unknown."""
    function = _capture_info()
    if function is None:
        return None
    status, number = ctypes.c_int(), ctypes.c_uint64()
    error = function(
        stream.cuda_stream, ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    return number.value if error == 0 and status.value == _ACTIVE else None


def set_capture_start() -> None:
    """Declare that graphs are being captured, until `set_capture_end`."""
    _state.capturing = True


def set_capture_end() -> None:
    """Declare that no graphs are being captured."""
    _state.capturing = False


def is_graph_capturing() -> bool:
    """Return whether `set_capture_start` has declared that graphs are being captured."""
    return _state.capturing


def is_capturing(device: torch.device) -> bool:
    """Return whether work on a device is being captured in a CUDA graph, by any library."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class CudaRecording:
    """A CUDA graph and the tensors that it writes."""

    def __init__(self, graph: torch.cuda.CUDAGraph, results: Results):
        self.graph = graph
        self.results = results

    def replay(self, stream: Any = None, event: Any = None) -> None:
        """Replay on the current stream, or on the given one, which then waits for the current one."""
        current = torch.cuda.current_stream()
        if stream is None or stream == current:
            self.graph.replay()
            return
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self.graph.replay()
            event = torch.cuda.Event() if event is None else event
            event.record(stream)
        current.wait_event(event)

    def reset(self) -> None:
        self.graph.reset()
        self.results = ()


_INVALIDATED = (
    "a CUDA graph was not captured, because work outside of the captured stream took part: work of another thread, or "
    "in a backward pass a parameter's gradient accumulator on the default stream, where a wrapper such as "
    "DistributedDataParallel creates it; create the wrapper under torch.cuda.stream(torch.cuda.Stream())"
)


def _is_invalidation(error: BaseException) -> bool:
    """Return whether CUDA stopped a capture because of work outside the captured stream."""
    # The second message is about work on the default stream.
    messages = ("during capture", "depend on a capturing blocking stream")
    return isinstance(error, RuntimeError) and any(message in str(error) for message in messages)


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return the stream for all recorders on a device: libraries keep one workspace per stream that they have used."""
    return torch.cuda.Stream(device)


class CudaRecorder:
    """Records CUDA graphs that share a memory pool.

    Args:
        pool: A torch.cuda.graph_pool_handle() result; None: a new pool.
        generators: Random generators of the bodies, in addition to torch's default ones.
    """

    def __init__(self, pool: Any = None, generators: Sequence[torch.Generator] = ()):
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self.generators = generators
        self.stream = _capture_stream(torch.cuda.current_device())

    @contextmanager
    def warming(self) -> Iterator[None]:
        torch.cuda.synchronize()
        with self.capture_stream_context():
            yield
        torch.cuda.synchronize()

    @contextmanager
    def capture_stream_context(self) -> Iterator[None]:
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            current.wait_stream(self.stream)

    def keep_until_read(self, tensors: Sequence[Tensor]) -> None:
        current = torch.cuda.current_stream()
        for tensor in tensors:
            as_storage: Any = getattr(tensor, "as_storage", None)  # of a quantized tensor
            for part in (tensor,) if as_storage is None else as_storage().flatten()[0]:
                if part is not None and part.is_cuda:
                    part.record_stream(current)

    def record(self, body: Callable[[], Results]) -> CudaRecording:
        graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            graph.register_generator_state(generator)
        # Other threads may call CUDA at the same time, for example a data loader that pins memory.
        recording = torch.cuda.graph(
            graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
        )
        current = torch.cuda.current_stream()
        try:
            with _disable_collection(), recording:
                results = body()
        except BaseException as error:
            torch.cuda.set_stream(current)
            # torch resets random generators only when a capture ends successfully; until then, they
            # raise an error. An empty capture that succeeds resets them.
            empty = torch.cuda.CUDAGraph()
            for generator in self.generators:
                empty.register_generator_state(generator)
            with torch.cuda.graph(empty, stream=self.stream, capture_error_mode="thread_local"):
                torch.zeros(1, device="cuda")
            failure = error
            if isinstance(error, RuntimeError) and "during capture" in str(error):
                # After an error in the body, the end of the capture fails, too, and hides it.
                failure = error.__context__ or error
            if _is_invalidation(failure):
                raise RuntimeError(_INVALIDATED) from failure
            if failure is not error:
                raise failure from failure.__cause__
            raise
        return CudaRecording(graph, results)


@contextmanager
def _disable_collection() -> Iterator[None]:
    """Disable garbage collection: a collected tensor would return its memory to the pool that is being recorded."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def alias_unowned(values: Tensor) -> Tensor:
    """Return a tensor on the same memory that does not keep it alive, for memory from a pool with another owner."""
    storage = torch._C._construct_storage_from_data_pointer(
        values.untyped_storage().data_ptr(), values.device, values.untyped_storage().nbytes()
    )
    result = torch.empty(0, dtype=values.dtype, device=values.device)
    return result.set_(storage, values.storage_offset(), values.size(), values.stride())
