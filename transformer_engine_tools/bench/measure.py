"""Measuring one call: GPU, host and wall milliseconds, and the additional memory.

* gpu_ms: time between two events around the call on the stream. The stream sleeps first, so that every launch is queued
  before the first one runs, and the L2 cache holds other data.
* cpu_ms: time until the call returns to the host, with its work queued.
* eager_ms: wall time per call in a call loop, as in a training step; roughly the larger of the other two.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

# torch.cuda._sleep cycles per second. A GPU with a slower clock sleeps longer, which is harmless.
CYCLES = 1.9e9
EVICTING = 256 << 20  # bytes, several times the largest L2 cache
SLEEP = "spin_kernel"  # kernel of torch.cuda._sleep


class Effort(NamedTuple):
    """Number of times a call is repeated: until budget_ms are spent, within the limits.

    Attributes:
        warmup: Calls before the measurement.
        budget_ms: Time after which the repetition ends.
        fewest: Lowest number of calls.
        most: Highest number of calls.
    """

    warmup: int = 5
    budget_ms: float = 120.0
    fewest: int = 8
    most: int = 40

    def runs(self, one_ms: float) -> int:
        """Number of repetitions for a call with this many milliseconds."""
        return max(self.fewest, min(self.most, int(self.budget_ms / max(one_ms, 1e-3))))


FULL = Effort()
QUICK = Effort(warmup=2, budget_ms=30.0, fewest=3, most=10)


class Timing(NamedTuple):
    """Milliseconds, medians. None: the device has no queue, as on a CPU.

    Attributes:
        gpu_ms: Time on the device.
        cpu_ms: Host time until the call returns.
        eager_ms: Wall time of a call that is waited for.
    """

    gpu_ms: float | None
    cpu_ms: float | None
    eager_ms: float

    @property
    def busiest(self) -> float:
        """The time that rates refer to: GPU time, or wall time without a GPU."""
        return self.eager_ms if self.gpu_ms is None else self.gpu_ms


class Figures(NamedTuple):
    """The figures of a case.

    Attributes:
        timing: Times per call.
        peak_mib: Additional memory per call.
        compile_s: Seconds until the first call is possible, for a compiled program.
        cached_s: The same with the program from the compiler's cache on disk.
        fp8_calls: Products with FP8 operands that the program passes to cuBLASLt.
    """

    timing: Timing
    peak_mib: float | None = None
    compile_s: float | None = None
    cached_s: float | None = None
    fp8_calls: int | None = None


def measure(call: Callable[[], object], device: torch.device, effort: Effort = FULL) -> Timing:
    """Time a call whose work runs on the device."""
    for _ in range(effort.warmup):
        call()
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        times = [1e3 * (time.perf_counter() - start)]
        for _ in range(effort.runs(times[0]) - 1):
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
        return Timing(gpu_ms=None, cpu_ms=None, eager_ms=statistics.median(times))
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    runs = effort.runs(1e3 * (time.perf_counter() - start))
    other = torch.empty(EVICTING, dtype=torch.uint8, device="cuda")
    gpu, cpu = map(
        statistics.median, zip(*[_time_once(call, other, host) for _ in range(runs)], strict=True)
    )
    del other
    start = time.perf_counter()
    for _ in range(runs):
        call()
    torch.cuda.synchronize()
    return Timing(gpu, cpu, 1e3 * (time.perf_counter() - start) / runs)


def measure_in_turns(calls: Sequence[Callable[[], object]], runs: int) -> list[float]:
    """Measure each call's median GPU milliseconds alternately, so that a warm-up affects all equally."""
    for call in calls:
        for _ in range(FULL.warmup):
            call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for call in calls:
        call()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    other = torch.empty(EVICTING, dtype=torch.uint8, device="cuda")
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(runs):
        for call, samples in list(zip(calls, times, strict=True))[:: 1 if turn % 2 else -1]:
            samples.append(_time_once(call, other, host)[0])
    return [statistics.median(samples) for samples in times]


def pause(other: torch.Tensor, host: float) -> None:
    """Make the GPU write `other`, which evicts the L2 cache, and sleep while a call is queued.

    Args:
        other: Tensor that is larger than the L2 cache.
        host: Seconds that queueing takes.
    """
    other.zero_()
    torch.cuda._sleep(int(min(2.5 * host + 2e-4, 0.04) * CYCLES))


def _time_once(call: Callable[[], object], other: torch.Tensor, host: float) -> tuple[float, float]:
    """Measure (GPU ms, host ms) for one call."""
    pause(other, host)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    start = time.perf_counter()
    call()
    cpu = 1e3 * (time.perf_counter() - start)
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last), cpu


def peak_mib(call: Callable[[], object], device: torch.device) -> float | None:
    """Measure the maximum MiB allocated during a call in addition to the present ones; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def span_length(spans: Iterable[tuple[float, float]]) -> float:
    """Compute the length of the union of spans (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
