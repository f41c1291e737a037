"""Shared by the scripts in this folder: options, the machine, the figures file, and the copy rate."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from transformer_engine import __version__
from transformer_engine_tools.bench.measure import measure

GPU = torch.device("cuda")


class Named(Protocol):
    @property
    def name(self) -> str: ...


C = TypeVar("C", bound=Named)


def parser(
    description: str | None, only: str = "run the cases whose name contains this"
) -> argparse.ArgumentParser:
    """A parser with --json and --only."""
    instance = argparse.ArgumentParser(description=description)
    instance.add_argument("--json", type=Path, help="write the figures to this file")
    instance.add_argument("--only", default="", help=only)
    return instance


def options(result: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the options of a script that needs a GPU, and seed its random numbers."""
    chosen = result.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("these figures need a CUDA device; torch.cuda.is_available() is False")
    torch.manual_seed(0)
    return chosen


def join_ranks(gpu_backends: str) -> torch.device:
    """Join the process group that torchrun describes, and return this rank's device; ranks on CPUs use gloo."""
    on_gpu = torch.cuda.is_available()
    dist.init_process_group(gpu_backends if on_gpu else "gloo")
    if not on_gpu:
        return torch.device("cpu")
    torch.cuda.set_device(dist.get_rank())
    return torch.device("cuda", dist.get_rank())


def select_cases(cases: Iterable[C], only: str) -> Iterator[C]:
    """The cases whose name contains `only`."""
    return (case for case in cases if only in case.name)


def machine(**libraries: Any) -> dict[str, Any]:
    """Describe the machine, the libraries and the command."""
    has_gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if has_gpu else "none",
        "transformer_engine": __version__,
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        **libraries,
        "command": " ".join(Path(argument).name for argument in sys.argv),
    }


def write(path: Path | None, about: dict[str, Any] | None = None, **figures: Any) -> None:
    """Write the figures and a description of the machine, if a path is given; about: machine(..)."""
    if path is not None:
        path.write_text(json.dumps({"machine": about or machine(), **figures}, indent=1) + "\n")


def kernel_durations(call: Callable[[], object], passes: int) -> dict[str, list[float]]:
    """Profile a call that has run before: {kernel, copy or fill: microseconds of each launch, in order}."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as observed:
        for _ in range(passes):
            call()
        torch.cuda.synchronize()
    durations: dict[str, list[float]] = defaultdict(list)
    for event in observed.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            durations[event.name].append(event.time_range.elapsed_us())
    return durations


def copy_rate(size: int) -> float:
    """TB/s for a device-to-device copy that reads and writes `size` bytes together."""
    source = torch.empty(size // 2, dtype=torch.uint8, device=GPU).random_()
    target = torch.empty_like(source)
    return size / measure(lambda: target.copy_(source), GPU).busiest / 1e9
