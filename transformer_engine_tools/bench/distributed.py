"""`te bench --distributed`: collectives and layers on several ranks against one device, in one run.

* one_ms: a one-device step without communication, the mean over all ranks.
* eager_ms: a step on the ranks, in a step loop, on the slowest rank.
* compute_ms: the same with a process group whose collectives return at once.
* exposed: fraction of a step in which a rank only communicates, from a trace of the GPU's kernels, or otherwise
  (eager_ms - compute_ms) / eager_ms.
* host_ms: time until an eager step on the ranks has queued its work, on the slowest rank.
* graphed_ms, graphed_speedup, graphed_exposed: the same figures with the layer's passes as CUDA graphs.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from .distributed_cases import RanksCase
from .distributed_steps import build_step
from .measure import Effort, peak_mib, span_length

MEANING = (
    "one_ms: a step of one device (mean over the ranks); eager_ms: a step of the ranks in a loop of steps (the slowest "
    "rank); compute_ms: eager_ms with collectives that transfer nothing; speedup: work of all ranks per time relative "
    "to one device; exposed: part of the step in which a rank only communicates, from a trace on GPUs; host_ms: time "
    "until a step has queued its work; graphed_*: with the layer's passes as CUDA graphs; rate: bytes that a rank "
    "sends per second; peak_mib, one_mib: additional memory of a step per rank"
)
# Long-sequence steps take a second, and every case has three variants.
FULL_ON_RANKS = Effort(warmup=2, budget_ms=400.0, fewest=3, most=30)
QUICK_ON_RANKS = Effort(warmup=2, budget_ms=20.0, fewest=2, most=10)
ROUNDS = 2  # each variant is measured in turns, so that a clock change affects all variants
TRACED_STEPS = 3
HOST_STEPS = 5
LONG_MS = 300.0  # a longer step is measured once per round, because its launches and clock changes hardly matter
GRAPHED = ("layer_tp", "layer_sp", "layer_ub")  # families whose passes are also captured
Group = Any  # dist.ProcessGroup


@dataclass(frozen=True)
class RanksRow:
    """The figures of a case; None if not applicable. The module's docstring defines them."""

    case: str
    family: str
    recipe: str
    ranks: int
    provider: str = "te"
    one_ms: float | None = None
    eager_ms: float | None = None
    compute_ms: float | None = None
    speedup: float | None = None
    exposed: float | None = None
    host_ms: float | None = None
    graphed_ms: float | None = None
    graphed_speedup: float | None = None
    graphed_exposed: float | None = None
    rate: float | None = None
    unit: str | None = None
    one_mib: float | None = None
    peak_mib: float | None = None
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Fields that are not None, with rounded figures."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        return {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in values.items()
        }


@dataclass(frozen=True)
class Groups:
    """The process groups in a run.

    Attributes:
        world: The ranks, whose communication is measured.
        silent: The same ranks; collectives return at once without transferring data.
        control: The same ranks on gloo, which agree on repetitions and exchange figures.
    """

    world: Group
    silent: Group
    control: Group

    @classmethod
    def create_groups(cls) -> Groups:
        """Create the groups; every rank calls this once."""
        # Importing this module registers torch's backend "fake".
        import torch.testing._internal.distributed.fake_pg  # noqa: F401

        return cls(dist.group.WORLD, dist.new_group(backend="fake"), dist.new_group(backend="gloo"))

    def gathered(self, value: Any) -> list[Any]:
        """Gather the value from every rank."""
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self.control)
        return values


def run_on_ranks(
    cases: Iterable[RanksCase], groups: Groups, device: torch.device, effort: Effort = FULL_ON_RANKS
) -> Iterator[RanksRow]:
    """Measure the cases one by one; every rank calls this with the same cases."""
    single_device: dict[Any, tuple[float, float | None]] = {}
    for case in cases:
        torch.manual_seed(0)
        FP8GlobalStateManager.reset()  # later steps would update the scales of earlier cases too
        error = None
        figures: dict[str, Any] = {}
        try:
            figures = _figures(case, groups, device, effort, single_device)
        except Exception as raised:  # the error of a case is its result
            error = f"{type(raised).__name__}: {raised}".splitlines()[0][:300]
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
        errors = [rank_error for rank_error in groups.gathered(error) if rank_error is not None]
        if errors:
            figures = {"error": errors[0]}
        yield RanksRow(case.name, case.family, case.recipe, dist.get_world_size(), **figures)


def _figures(
    case: RanksCase,
    groups: Groups,
    device: torch.device,
    effort: Effort,
    single_device: dict[Any, tuple[float, float | None]],
) -> dict[str, Any]:
    """Measure a case.

    Args:
        case: The case.
        groups: The groups of the run.
        device: This rank's device.
        effort: Repetitions.
        single_device: Milliseconds and MiB of one-device steps in this run. Cases that differ in their scheme have one.
    """
    if case.family == "collective":
        step = build_step(case, groups.world, device)
        (times,) = _time_in_turns([step], groups, device, effort)
        slowest = max(groups.gathered(times))
        return {"eager_ms": slowest, "rate": case.moved / slowest / 1e6, "unit": "GB/s"}
    on_gpu = device.type == "cuda"
    steps = {
        "world": build_step(case, groups.world, device),
        "silent": build_step(case, groups.silent, device),
    }
    if case.one_device not in single_device:
        steps["one"] = build_step(case, None, device)
    if on_gpu and case.family in GRAPHED:
        steps["graphed"] = build_step(case, groups.world, device, graphed=True)
    times = dict(
        zip(steps, _time_in_turns(list(steps.values()), groups, device, effort), strict=True)
    )
    if "one" in steps:
        peak = peak_mib(steps["one"], device)
        single_device[case.one_device] = statistics.mean(groups.gathered(times["one"])), peak
    one_ms, one_mib = single_device[case.one_device]
    is_long = max(groups.gathered(times["world"])) > LONG_MS
    host = _host_ms(steps["world"], groups, device, 1 if is_long else HOST_STEPS)
    peak = peak_mib(steps["world"], device)
    traced: dict[str, float | None] = {}
    if on_gpu:
        repeated = 1 if is_long else TRACED_STEPS
        traced = {
            name: traced_exposure(steps[name], repeated)
            for name in steps
            if name in ("world", "graphed")
        }
    slowest = _max_over_ranks(groups.gathered({**times, "host": host, "peak": peak}))
    exposed = _max_over_ranks(groups.gathered(traced))
    several, compute = slowest["world"], slowest["silent"]
    figures: dict[str, Any] = {
        "one_ms": one_ms,
        "eager_ms": several,
        "compute_ms": compute,
        "speedup": case.work * one_ms / several,
        "exposed": exposed.get("world", max(0.0, several - compute) / several),
        "host_ms": slowest["host"],
    }
    if "graphed" in steps:
        figures |= {
            "graphed_ms": slowest["graphed"],
            "graphed_speedup": case.work * one_ms / slowest["graphed"],
            "graphed_exposed": exposed.get("graphed"),
        }
    return figures | {"one_mib": one_mib, "peak_mib": slowest.get("peak")}


def _max_over_ranks(of_ranks: Sequence[dict[str, float | None]]) -> dict[str, float]:
    """Take the greatest figure of all ranks for each name, without names that have none."""
    slowest: dict[str, float] = {}
    for figures in of_ranks:
        for name, value in figures.items():
            if value is not None:
                slowest[name] = max(value, slowest.get(name, value))
    return slowest


def _host_ms(
    step: Callable[[], object], groups: Groups, device: torch.device, repeated: int
) -> float:
    """Measure the median milliseconds until a step returns to the host, with no earlier work in the queue."""
    times = []
    for _ in range(repeated):
        _synchronize(groups, device)
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def _synchronize(groups: Groups, device: torch.device) -> None:
    """Wait for this rank's device and for all ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier(group=groups.control)


def _time_in_turns(
    steps: Sequence[Callable[[], object]], groups: Groups, device: torch.device, effort: Effort
) -> list[float]:
    """Measure this rank's median milliseconds per step; all ranks run the same number of steps."""
    runs = []
    for step in steps:
        last_ms = 0.0
        for _ in range(effort.warmup):
            _synchronize(groups, device)
            start = time.perf_counter()
            step()
            _synchronize(groups, device)
            last_ms = 1e3 * (time.perf_counter() - start)
        # Ranks compare their settings before each collective until an optimizer step, see `pytorch.distributed.faults`.
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, device="cpu"))], lr=0.0).step()
        if max(groups.gathered(last_ms)) > LONG_MS:
            runs.append(1)
            continue
        one_ms = statistics.median(_intervals(step, 3, groups, device))
        runs.append(effort.runs(max(groups.gathered(one_ms))))
    samples: list[list[float]] = [[] for _ in steps]
    for _ in range(ROUNDS):
        for step, times, count in zip(steps, samples, runs, strict=True):
            times += _intervals(step, count, groups, device)
    return [statistics.median(times) for times in samples]


def _intervals(
    step: Callable[[], object], count: int, groups: Groups, device: torch.device
) -> list[float]:
    """Measure the milliseconds between the ends of consecutive steps; the ranks start together."""
    _synchronize(groups, device)
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(count):
            step()
            marks.append(time.perf_counter())
        return [1e3 * (last - first) for first, last in pairwise(marks)]
    if count > 1:
        step()  # fills the stream's queue
    stream = torch.cuda.current_stream(device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record(stream)
    for event in events[1:]:
        step()
        event.record(stream)
    torch.cuda.synchronize()
    return [first.elapsed_time(last) for first, last in pairwise(events)]


def traced_exposure(step: Callable[[], object], repeated: int = TRACED_STEPS) -> float | None:
    """Measure the fraction of a step in which the GPU only communicates; None if the trace has no kernels."""
    activity = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as profiler:
        for _ in range(repeated):
            step()
        torch.cuda.synchronize()
    kernels = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        # Host ranges, such as "nccl:all_reduce", are not kernels.
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith("nccl:")
    ]
    return exposure(kernels)


# Name parts of kernels that communicate, in lower case.
_COMMUNICATION = ("nccl", "memcpy ptop", "symmetric_memory::barrier")


def exposure(kernels: Iterable[tuple[str, float, float]]) -> float | None:
    """Compute the fraction of the time in which only communication runs, or None without kernels.

    Args:
        kernels: Name, start and end of each kernel, on any stream. NCCL's kernels, copies between GPUs and
            symmetric-memory barriers communicate.
    """
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for name, start, end in kernels:
        spans[any(part in name.lower() for part in _COMMUNICATION)].append((start, end))
    everything = spans[True] + spans[False]
    if not everything:
        return None
    total = max(end for _, end in everything) - min(start for start, _ in everything)
    return (span_length(everything) - span_length(spans[False])) / total
