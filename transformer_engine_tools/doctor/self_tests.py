"""Self-test of the command line: PyTorch in this process, then JAX in another process, as one report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable

from transformer_engine.common import optional
from transformer_engine.common.self_test import SECONDS, SelfTest, SelfTestResult, SelfTestSizes

JAX_MODULE = "transformer_engine.jax.self_test"
# After the limit, the process has this time to report the other cases as not run; then it is killed.
START_SECONDS = 60.0
KEPT_LINES = 20  # last lines of the error output, for the reason of a failure
# JAX otherwise allocates three quarters of the GPU's memory; formats that the GPU lacks are emulated, as in PyTorch.
ENVIRONMENT = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TE_EMULATE": "1"}


def run_all(
    progress: Callable[[str], None], sizes: SelfTestSizes | None = None, seconds: float = SECONDS
) -> SelfTest:
    """Run the self-tests of PyTorch and JAX; a framework that is not installed is a line of the report.

    Args:
        progress: Called with a line per path, before and after its cases.
        sizes: Case extents; by default large ones on a GPU and a sample on a CPU.
        seconds: Time of both, after which the remaining cases are reported as not run.
    """
    if (reason := optional.failure("torch")) is None:
        from transformer_engine.pytorch.inspect.self_test import self_test

        test = self_test(sizes, seconds, progress)
    else:
        missing = reason if optional.installed("torch") else "not installed"
        test = SelfTest({"torch": missing}, (), 0.0)
    return test + jax_self_test(progress, sizes, max(seconds - test.seconds, 0.0))


def jax_self_test(progress: Callable[[str], None], sizes: SelfTestSizes | None, seconds: float) -> SelfTest:
    """Run the self-test of JAX in another process."""
    start = time.perf_counter()
    if not optional.installed("jax"):
        return SelfTest({"JAX": "not installed"}, (), 0.0)
    extents = () if sizes is None else (sizes.large, sizes.small, sizes.tokens)
    command = [sys.executable, "-W", "ignore", "-m", JAX_MODULE, *map(str, (seconds, *extents))]
    path = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": path, **ENVIRONMENT}
    lines: deque[str] = deque(maxlen=KEPT_LINES)
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        timer = threading.Timer(seconds + START_SECONDS, process.kill)
        timer.daemon = True
        timer.start()
        assert process.stderr is not None
        try:
            for line in process.stderr:
                lines.append(line.rstrip())
                progress(lines[-1])
            code = process.wait()
        finally:
            timer.cancel()
            process.kill()  # no effect after its end
        output.seek(0)
        printed = output.read()
    elapsed = time.perf_counter() - start
    if code != 0:
        if elapsed >= seconds + START_SECONDS:
            lines.append(f"it was stopped after {elapsed:.0f} s")
        return _exit_result(code, list(lines), elapsed)
    found = json.loads(printed.splitlines()[-1])
    return SelfTest(found["machine"], tuple(SelfTestResult(**result) for result in found["results"]), elapsed)


def _exit_result(code: int, lines: list[str], elapsed: float) -> SelfTest:
    """Result of a failed process: JAX cannot be imported, a library ended it, or it ran out of time."""
    for line in reversed(lines):
        if line.startswith(("ImportError:", "ModuleNotFoundError:")):
            return SelfTest({"JAX": line}, (), elapsed)
    reason = f"the process ended with exit code {code}: {' '.join(lines[-5:])}"[-400:]
    return SelfTest({"JAX": "failed"}, (SelfTestResult("jax", "all", "all", "failed", reason),), elapsed)
