"""Run client programs, each in a separate process, because clients replace torch functions."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import socket
import tempfile
import time
import uuid
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.programs import ROOT, search_path

WITH_TORCH_211 = {
    "composer",
    "torchvision",
    "thunder",
    "looseversion",
    "physicsnemo",
    "warp",
    "pyvers",
}
ATTEMPTS = 3
PATIENCE = 400  # time limit for a process group, in seconds
# identical in all pytest processes
RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", uuid.uuid4().hex)


def environment(**more: str) -> dict[str, str]:
    """This process's environment, for programs that import this tree."""
    return {**os.environ, "PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1", **more}


def output(arguments: list[str], folder: Path) -> str:
    """What Python prints for these arguments: see `forked.output`."""
    return forked.output(arguments, folder, environment())


def once(arguments: list[str], ranks: int, **more: str) -> str:
    """Return `run_on_ranks`, computed by one pytest process and read by the others."""
    return _cache_across_processes(
        repr((arguments, ranks, more)), lambda folder: run_on_ranks(arguments, ranks, **more)
    )


def errors_of_examples(examples: dict[str, list[tuple[str, str, str | None]]]) -> dict[str, str]:
    """Run client examples (see tests/clients/forked_examples.py) in one pytest process.

    Args:
        examples: {client: [(title, source, default device)]}.

    Returns:
        {client: last standard-error lines, or "" if its examples pass}.
    """

    def compute(folder: Path) -> str:
        programs = {}
        for client, sources in examples.items():
            position = folder / client
            position.mkdir(exist_ok=True)
            programs[client] = (str(position), sources)
        (folder / "examples.json").write_text(json.dumps(programs))
        return output(
            [str(ROOT / "tests/clients/forked_examples.py"), str(folder / "examples.json")], folder
        )

    return json.loads(_cache_across_processes(json.dumps(examples), compute).splitlines()[-1])


def _cache_across_processes(key: str, compute: Callable[[Path], str]) -> str:
    """Share the result that `compute` gave in the first pytest process with this key."""
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"clients-of-{RUN}", name)
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / "output"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            result.write_text(compute(folder))
        return result.read_text()


def run_on_ranks(arguments: list[str], ranks: int, **more: str) -> str:
    """Run a process group and return rank 0's output, or raise with the first failing rank's last lines.

    Another process may take the free port before the group binds it. The call then retries with another port.
    """
    for _ in range(ATTEMPTS):
        try:
            return _start_ranks(arguments, ranks, **more)
        except AssertionError as error:
            if "EADDRINUSE" not in str(error):
                raise
    return _start_ranks(arguments, ranks, **more)


def _start_ranks(arguments: list[str], ranks: int, **more: str) -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE=str(ranks), **more)
    started = [
        forked.Program(
            arguments, Path.cwd(), {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(ranks)
    ]
    failed = _first_to_fail([program.process for program in started])
    assert failed is None, started[failed].errors[-3000:]
    return started[0].printed


def _first_to_fail(started: list[BaseProcess]) -> int | None:
    """Return the first process that fails or exceeds the time limit; the others are stopped."""
    end = time.monotonic() + PATIENCE
    try:
        while time.monotonic() < end:
            codes = [process.exitcode for process in started]
            for rank, code in enumerate(codes):
                if code:
                    return rank
            if None not in codes:
                return None
            time.sleep(0.05)
        return next(rank for rank, process in enumerate(started) if process.exitcode is None)
    finally:
        for process in started:
            process.kill()
            process.join()


def skip_unless_installed(needed: tuple[str, ...]) -> None:
    """Skip a test where a package that it needs is not installed."""
    absent = [name for name in needed if importlib.util.find_spec(name) is None]
    if absent:
        how = "see tests/clients/requirements_torch211.txt"
        if not set(absent) & WITH_TORCH_211:
            how = "`make test-clients` installs it"
        pytest.skip(f"{', '.join(absent)} is not installed; {how}")
