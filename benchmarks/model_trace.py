"""Kernels in one training step, from torch's profiler: by name, and by part of the step; for `model_step.py`."""

from __future__ import annotations

import json
import subprocess
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from model_arms import MARK
from torch.profiler import ProfilerActivity, profile

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
ATTENTION = ("attention", "attn", "fmha", "flash", "sdpa", "cudnn_generated")
Event = dict[str, Any]


def trace(step: Callable[[], Any], device: str) -> dict[str, Any]:
    """Profile one step that follows two others without a pause; times in microseconds.

    Returns:
        `wall_us`, from the begin of the first kernel to the end of the last; `kernel_us`, the sum over kernels;
        `gap_us`, the time in which no kernel runs; `groups` and `kernels`, tables with count, sum and share of the
        wall time; `clocks`, what nvidia-smi reads under load.
    """
    events = _profile_step(step, device)
    work = sorted(
        (event for event in events if event.get("cat") in DEVICE_WORK),
        key=lambda event: event["ts"],
    )
    if not work:
        return {
            "wall_us": None,
            "kernel_us": 0.0,
            "gap_us": None,
            "groups": [],
            "kernels": [],
            "clocks": None,
        }
    wall = max(event["ts"] + event["dur"] for event in work) - work[0]["ts"]
    parts = _parts(events, work)
    return {
        "wall_us": wall,
        "kernel_us": sum(event["dur"] for event in work),
        "gap_us": wall - _busy(work),
        "groups": _table(work, parts, wall),
        "kernels": _table(
            work, [(part, event["name"]) for part, event in zip(parts, work, strict=True)], wall
        ),
        "clocks": clocks(step),
    }


def count_launches(step: Callable[[], Any], device: str) -> int | None:
    """Kernels, copies and fills that one step starts on a GPU, or None on a CPU."""
    if device != "cuda":
        return None
    return sum(event.get("cat") in DEVICE_WORK for event in _profile_step(step, device, ahead=0))


def clocks(step: Callable[[], Any]) -> str | None:
    """SM clock, memory clock (MHz) and power (W) while steps run."""
    query = [
        "nvidia-smi",
        "--query-gpu=clocks.sm,clocks.mem,power.draw",
        "--format=csv,noheader,nounits",
    ]
    for _ in range(4):
        step()
    try:
        reading = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
    except FileNotFoundError:
        return None
    while reading.poll() is None:
        step()
    return reading.communicate()[0].strip()


def _profile_step(step: Callable[[], Any], device: str, ahead: int = 2) -> list[Event]:
    """Events of one step. `ahead` steps are queued first, so that the GPU does not idle when the step begins."""
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with profile(activities=activities) as profiler:
        for _ in range(ahead):
            step()
        with torch.profiler.record_function(MARK + "measured"):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(str(path := Path(folder) / "trace.json"))
        events: list[Event] = json.loads(path.read_text())["traceEvents"]
    return _last_step(events)


def _last_step(events: list[Event]) -> list[Event]:
    """Host events in the measured step, and the device work that they launched."""
    measured = next(
        event for event in events if event.get("name") == MARK + "measured" and "dur" in event
    )
    begin, end = measured["ts"], measured["ts"] + measured["dur"]
    host = [
        event
        for event in events
        if event.get("cat") not in DEVICE_WORK and begin <= event.get("ts", -1.0) <= end
    ]
    launched = {_correlation(event) for event in host} - {None}
    return host + [
        event
        for event in events
        if event.get("cat") in DEVICE_WORK and "dur" in event and _correlation(event) in launched
    ]


def _parts(events: list[Event], work: list[Event]) -> list[str]:
    """Each kernel's part of the step: the last mark before its launch on the host, or attention by its name."""
    marks = sorted(
        (event["ts"], event["name"].removeprefix(MARK))
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(MARK)
        if event["name"] != MARK + "measured"
    )
    times = [time for time, _ in marks]
    launches = {
        _correlation(event): event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    parts = []
    for event in work:
        index = bisect_right(times, launches.get(_correlation(event), -1.0)) - 1
        part = marks[index][1] if index >= 0 else "unassigned"
        name = event["name"].lower()
        parts.append(
            "attention" if part == "layers" and any(word in name for word in ATTENTION) else part
        )
    return parts


def _table(work: list[Event], keys: list[Any], wall: float) -> list[dict[str, Any]]:
    """Per key: count, sum and wall-time share, the largest sum first."""
    counts: dict[Any, int] = defaultdict(int)
    sums: dict[Any, float] = defaultdict(float)
    for event, key in zip(work, keys, strict=True):
        counts[key] += 1
        sums[key] += event["dur"]
    rows = []
    for key in sorted(sums, key=sums.__getitem__, reverse=True):
        label = {"group": key} if isinstance(key, str) else {"group": key[0], "name": key[1][:120]}
        rows.append(
            label
            | {"count": counts[key], "us": round(sums[key], 1), "share": round(sums[key] / wall, 4)}
        )
    return rows


def _busy(work: list[Event]) -> float:
    """Microseconds in which at least one kernel runs; `work` is sorted by begin."""
    busy, reached = 0.0, work[0]["ts"]
    for event in work:
        end = event["ts"] + event["dur"]
        busy += max(0.0, end - max(reached, event["ts"]))
        reached = max(reached, end)
    return busy


def _correlation(event: Event) -> int | None:
    return event.get("args", {}).get("correlation")
