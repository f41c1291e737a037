"""Ranks that do not take part in a collective are named while the others wait for them.

A collective of NCCL returns to the host before it runs. If a rank has ended or waits elsewhere, the other ranks
wait on their GPUs until the process group's timeout ends them, and no error reaches the layer. A thread on each
rank therefore reports every PERIOD seconds how many collectives its groups have queued, and logs the ranks that
have queued fewer than this one, or that have stopped to report, once nothing has changed for a time.
"""

from __future__ import annotations

import atexit
import json
import logging
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

PERIOD = 5.0  # seconds between reports
PATIENCE = 30.0  # seconds without progress; less if the timeout of a group is below twice as many
MISSED = 3  # reports that a rank has missed when it counts as ended
LOGGER = logging.getLogger("transformer_engine.distributed")
_KEY = "transformer_engine/progress/"


def watch(group: Any) -> None:
    """Name the ranks that delay a group with asynchronous collectives, which those of NCCL are."""
    if "nccl" in dist.get_backend_config(group):
        MONITOR.add(group)


class Progress:
    """Collectives that this rank has queued in a group, and since when.

    Args:
        group: Process group.
        now: Current time in seconds.
    """

    def __init__(self, group: Any, now: float):
        self.count, self.since, self.named = queued(group), now, False

    def update(self, group: Any, now: float) -> None:
        """Count the queued collectives again."""
        count = queued(group)
        if count != self.count:
            self.count, self.since, self.named = count, now, False


def queued(group: Any) -> int:
    """Return how many collectives this rank has queued in a group."""
    return group._get_sequence_number_for_group()


@dataclass
class Report:
    """The last report of a rank, and when it arrived by the clock of the reader.

    Attributes:
        number: Number of the report.
        queued: Collectives that the rank has queued, by group name.
        arrived: Seconds.
    """

    number: int
    queued: dict[str, int]
    arrived: float


def delaying_ranks(name: str, count: int, reports: dict[int, Report], now: float) -> str:
    """Describe the ranks that delay a group; "" if no report shows one.

    Args:
        name: Group name.
        count: Collectives that this rank has queued.
        reports: The last reports of the other ranks.
        now: Current time in seconds.
    """
    delays: list[str] = []
    for rank, report in reports.items():
        silent = now - report.arrived
        if silent > MISSED * PERIOD:
            delays.append(
                f"rank {rank} has ended or does not respond, it has not reported for {silent:.0f} s"
            )
        elif report.queued.get(name, count) < count:
            delays.append(f"rank {rank} has queued {report.queued[name]} and does not take part")
    return "; ".join(delays)


class Monitor:
    """Thread that reports the progress of this rank, and compares it with that of the others."""

    def __init__(self) -> None:
        self._groups: WeakKeyDictionary[Any, Progress] = WeakKeyDictionary()
        self._reports: dict[int, Report] = {}  # of other ranks
        self._number = 0  # of this rank's reports
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, group: Any) -> None:
        """Watch a group until the process groups are destroyed."""
        with self._lock:
            if group in self._groups:
                return
            self._groups[group] = Progress(group, time.monotonic())
            if self._thread is None:
                self._stop.clear()
                self._thread = threading.Thread(
                    target=self._run, name="progress of ranks", daemon=True
                )
                self._thread.start()
                atexit.register(self.stop)

    def stop(self) -> None:
        """End the thread, which must not use the store while the interpreter ends."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2 * PERIOD)

    def _run(self) -> None:
        try:
            while dist.is_initialized():
                self.step(time.monotonic())
                if self._stop.wait(PERIOD):
                    return
        except Exception as error:
            # the groups are being destroyed, or the rank that holds the store has ended
            if dist.is_initialized() and not self._stop.is_set():
                LOGGER.warning(
                    "rank %s: the store of the process group does not respond; the rank that holds it, usually "
                    "rank 0, has ended (%s)",
                    dist.get_rank(),
                    str(error).splitlines()[0],
                )
        finally:
            with self._lock:
                self._thread = None
                self._groups.clear()

    def step(self, now: float) -> None:
        """Report the progress of this rank, and log the ranks that delay it."""
        store, own = dist.distributed_c10d._get_default_store(), dist.get_rank()
        with self._lock:
            known = dist.distributed_c10d._world.pg_map
            groups = [
                (group, progress) for group, progress in self._groups.items() if group in known
            ]
        for group, progress in groups:
            progress.update(group, now)
        self._number += 1
        counts = {group.group_name: progress.count for group, progress in groups}
        store.set(f"{_KEY}{own}", json.dumps([self._number, counts]))
        for group, progress in groups:
            waited, limit = now - progress.since, patience(group)
            if progress.named or waited < limit / 2:
                continue
            members = dist.get_process_group_ranks(group)
            reports = {rank: self._read(store, rank, now) for rank in members if rank != own}
            rank_reports = {rank: report for rank, report in reports.items() if report is not None}
            delaying = delaying_ranks(group.group_name, progress.count, rank_reports, now)
            if delaying and waited >= limit:
                progress.named = True
                LOGGER.warning(
                    "rank %s has queued %s collectives over ranks %s and none for %.0f s: %s",
                    own,
                    progress.count,
                    members,
                    waited,
                    delaying,
                )

    def _read(self, store: Any, rank: int, now: float) -> Report | None:
        """Read the last report of a rank; None if it has not reported."""
        key = f"{_KEY}{rank}"
        if not store.check([key]):
            return None
        number, counts = json.loads(store.get(key))
        last = self._reports.get(rank)
        if last is None or last.number != number:
            self._reports[rank] = last = Report(number, counts, now)
        return last


def patience(group: Any) -> float:
    """Return the seconds without progress after which the missing ranks of a group are named."""
    timeouts = [
        backend.options._timeout.total_seconds()
        for backend in {group._get_backend(device) for device in group._device_types}
        if isinstance(getattr(getattr(backend, "options", None), "_timeout", None), timedelta)
    ]
    return min([PATIENCE, *[seconds / 2 for seconds in timeouts]])


MONITOR = Monitor()
