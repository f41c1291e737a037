"""Compiling the self-test's kernels in several processes, which fill Triton's cache on disk.

python -m transformer_engine.pytorch.inspect.self_test_compile PART PARTS GPU LARGE SMALL TOKENS
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from ...common.dispatch import observing, tables, use_backend
from ...common.self_test import SelfTestSizes
from ..quantization import emulate
from ..runtime import self_tested
from .self_test_cases import cases
from .self_test_products import SelfTestCase

# Backends whose first call takes longer than all other cases together, with an empty cache.
LEFT_OUT = {
    "flex": "torch.compile compiles it for minutes",
    "fla": "its first call tunes kernels for minutes",
}
# Processes that compile kernels: a kernel takes about one core second, a process 2 GiB of the GPU's
# memory and ten seconds to start.
MOST_PROCESSES, PROCESS_MEMORY, COMPILE_SECONDS = 8, 2 << 30, 60.0


class _Found(Exception):
    """Ends a computation at its first request, before a backend runs."""


def first_request(case: SelfTestCase) -> Any:
    """The first request that a case makes to its operation; None if it makes none."""
    found: list[Any] = []

    def see(operation: str, request: Any) -> None:
        if operation == case.operation:
            found.append(request)
            raise _Found

    try:
        with observing(see):
            case.compute()
    except _Found:
        return found[0]
    return None


def compile_part(part: int, parts: int, sizes: SelfTestSizes) -> None:
    """Run every parts-th case with all its backends, so that their kernels are in Triton's cache on disk.

    An exception ends the backend's run here; the self-test meets it again, and reports it.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    with emulate():
        for index, case in enumerate(cases(device, sizes)):
            if index % parts == part:
                with self_tested.testing(case.path):
                    _run_backends(case)


def _run_backends(case: SelfTestCase) -> None:
    try:
        request = first_request(case)
        table = tables[case.operation]
        backends = () if request is None else table.candidates(request)
    except Exception:  # reported by the self-test itself
        return
    for backend in backends:
        if backend.name in (*LEFT_OUT, "reference"):
            continue
        try:
            with use_backend(**{case.operation: backend.name}):
                case.compute()
        except Exception:  # reported by the self-test itself
            continue


def compile_ahead(sizes: SelfTestSizes, progress: Callable[[str], None]) -> None:
    """Compile the kernels in several processes, as many as cores and memory allow."""
    free, _ = torch.cuda.mem_get_info()
    parts = min(MOST_PROCESSES, (os.cpu_count() or 1) // 2, free // PROCESS_MEMORY)
    if parts < 2:
        return
    progress(f"compiling kernels in {parts} processes")
    start = time.perf_counter()
    numbers = sizes.large, sizes.small, sizes.tokens
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with tempfile.TemporaryFile() as errors:
        command = [sys.executable, "-W", "ignore", "-m", f"{__package__}.self_test_compile"]
        processes = [
            subprocess.Popen(
                [*command, *map(str, (part, parts, torch.cuda.current_device(), *numbers))],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
            for part in range(parts)
        ]
        stopped = [process for process in processes if not _ends(process, start + COMPILE_SECONDS)]
        for process in stopped:
            process.kill()
            process.wait()
        errors.seek(0)
        message = errors.read().decode(errors="replace").strip()
    failed = sum(process.returncode != 0 for process in processes)
    progress(
        f"compiled in {time.perf_counter() - start:.1f} s; {parts - failed} of {parts} processes ended"
    )
    if message:
        progress(message[-500:])


def _ends(process: subprocess.Popen[bytes], deadline: float) -> bool:
    try:
        process.wait(max(deadline - time.perf_counter(), 0.0))
    except subprocess.TimeoutExpired:
        return False
    return True


def main() -> None:
    """Compile the part that the command line names; `compile_ahead` starts these processes."""
    part, parts, gpu, large, small, tokens = map(int, sys.argv[1:])
    torch.cuda.set_device(gpu)
    compile_part(part, parts, SelfTestSizes(large, small, tokens))


if __name__ == "__main__":
    main()
