"""Self-test of the command line: PyTorch in this process, and JAX in other processes, as one report."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from transformer_engine.common import optional
from transformer_engine.common.self_test import (
    COMPILED,
    SECONDS,
    SelfTest,
    SelfTestResult,
    SelfTestSizes,
)

JAX_MODULE = "transformer_engine.jax.self_test"
# After the limit, the process has this time to report the other cases as not run; then it is killed.
START_SECONDS = 60.0
MOST_PROCESSES, CORES_PER_PROCESS = 4, 4
RUN_SECONDS = 8.0  # for the compiled programs of a process
POLL_SECONDS = 0.05
KEPT_LINES = 20  # last lines of the error output, for the reason of a failure
# JAX otherwise allocates three quarters of the GPU's memory; formats that the GPU lacks are emulated, as in PyTorch.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TE_EMULATE": "1"}


def run_all(
    progress: Callable[[str], None], sizes: SelfTestSizes | None = None, seconds: float = SECONDS
) -> SelfTest:
    """Run the self-tests of PyTorch and JAX; a framework that is not installed is a line of the report.

    The programs of JAX are compiled during the test of PyTorch and run after it, since both measure times on the GPU.

    Args:
        progress: Called with a line per path, before and after its cases.
        sizes: Case extents; by default large ones on a GPU and a sample on a CPU.
        seconds: Time of both, after which the remaining cases are reported as not run.
    """
    with JaxSelfTest(sizes, seconds) as jax_test:
        if (reason := optional.failure("torch")) is None:
            from transformer_engine.pytorch.inspect.self_test import self_test

            test = self_test(sizes, seconds, progress)
        else:
            missing = reason if optional.installed("torch") else "not installed"
            test = SelfTest({"torch": missing}, (), 0.0)
        return test + jax_test.run(progress, max(seconds - test.seconds, 0.0))


class JaxSelfTest:
    """The self-test of JAX in other processes, which compile their programs at once and run them one after another.

    Tracing holds the interpreter, so that several processes, each with a part of the paths, compile sooner.

    Args:
        sizes: Case extents; by default large ones on a GPU and a sample on a CPU.
        seconds: Time of this test and of the test that runs meanwhile; it limits the compilation.
    """

    def __init__(self, sizes: SelfTestSizes | None, seconds: float) -> None:
        extents = () if sizes is None else (sizes.large, sizes.small, sizes.tokens)
        arguments = [*map(str, (seconds, *extents)), "--wait"]
        parts = min(MOST_PROCESSES, max((os.cpu_count() or 1) // CORES_PER_PROCESS, 1))
        self._processes: list[_JaxProcess] = []
        if optional.installed("jax"):
            self._processes = [
                _JaxProcess([*arguments, *(("--part", f"{part}/{parts}") if parts > 1 else ())])
                for part in range(parts)
            ]

    def __enter__(self) -> JaxSelfTest:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.close()

    def run(self, progress: Callable[[str], None], seconds: float) -> SelfTest:
        """Run the programs, and return the results with the time that this call takes."""
        if not self._processes:
            return SelfTest({"JAX": "not installed"}, (), 0.0)
        start, end, waiting = time.perf_counter(), time.time() + seconds, list(self._processes)
        tests: list[SelfTest] = []
        while waiting:
            process = _choose_process(waiting, end)
            waiting.remove(process)
            tests.append(process.run(progress, end))
        return replace(sum(tests[1:], tests[0]), seconds=time.perf_counter() - start)


def _choose_process(waiting: list[_JaxProcess], end: float) -> _JaxProcess:
    """Choose a process that has compiled its programs, or the first one when the time for all runs begins."""
    while len(waiting) > 1 and time.time() < end - RUN_SECONDS * len(waiting):
        for process in waiting:
            if process.compiled.wait(POLL_SECONDS):
                return process
    return waiting[0]


class _JaxProcess:
    """A process with a part of the self-test of JAX.

    Attributes:
        compiled: Set once the programs are compiled, or the process has ended.
    """

    def __init__(self, arguments: list[str]) -> None:
        path = os.pathsep.join(path for path in sys.path if path)
        self._output = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  # closed in `close`
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", JAX_MODULE, *arguments],
            env={**os.environ, "PYTHONPATH": path, **ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        self.compiled = threading.Event()
        # A full pipe would stop the process during the test of PyTorch.
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read_lines, daemon=True).start()

    def close(self) -> None:
        self._process.kill()  # no effect after its end
        self._process.wait()
        self._output.close()

    def _read_lines(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.put(line.rstrip())
            if line.rstrip() == COMPILED:
                self.compiled.set()
        self._lines.put(None)
        self.compiled.set()

    def run(self, progress: Callable[[str], None], end: float) -> SelfTest:
        """Run the programs until `end`, a `time.time()`, and return the results with the time of this call."""
        process, start = self._process, time.perf_counter()
        limit = max(end - time.time(), 0.0) + START_SECONDS
        assert process.stdin is not None
        with suppress(OSError), process.stdin as pipe:  # the process may have ended
            pipe.write(f"{end}\n")
        timer = threading.Timer(limit, process.kill)
        timer.daemon = True
        timer.start()
        last: deque[str] = deque(maxlen=KEPT_LINES)
        try:
            while (line := self._lines.get()) is not None:
                last.append(line)
                progress(line)
            code = process.wait()
        finally:
            timer.cancel()
        self._output.seek(0)
        printed = self._output.read()
        elapsed = time.perf_counter() - start
        if code != 0:
            if elapsed >= limit:
                last.append(f"it was stopped after {elapsed:.0f} s")
            return _exit_result(code, list(last), elapsed)
        found = json.loads(printed.splitlines()[-1])
        return SelfTest(
            found["machine"],
            tuple(SelfTestResult(**result) for result in found["results"]),
            elapsed,
        )


def _exit_result(code: int, lines: list[str], elapsed: float) -> SelfTest:
    """Result of a failed process: JAX cannot be imported, a library ended it, or it ran out of time."""
    for line in reversed(lines):
        if line.startswith(("ImportError:", "ModuleNotFoundError:")):
            return SelfTest({"JAX": line}, (), elapsed)
    reason = f"the process ended with exit code {code}: {' '.join(lines[-5:])}"[-400:]
    return SelfTest(
        {"JAX": "failed"}, (SelfTestResult("jax", "all", "all", "failed", reason),), elapsed
    )
