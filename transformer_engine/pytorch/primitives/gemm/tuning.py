"""Choosing the fastest of cuBLASLt's candidate algorithms for a plan: timed once, kept in a file of the user's.

The heuristic is usually right. Tuning is off by default, because two algorithms may add in a
different order: with it, results depend on the measured times. The file holds text only, one for a GPU model and a
version of cuBLASLt; an algorithm read from it is checked by the library before it is used.
"""

from __future__ import annotations

import functools
import json
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ....common import env
from ..operand import Operand
from . import cublaslt_library as library
from .cublaslt_plan import CublasPlan
from .request import Epilogue

CANDIDATES = 8
_ROUNDS = 3
_DUELS = 9  # of the fastest candidate with the heuristic's first
_ROUND_SECONDS = 1e-3  # of GPU time for one candidate in one round or duel
_GAIN = 0.98  # another algorithm than the heuristic's first must need at most this share of its time


def tuned(plan: CublasPlan) -> Callable[[Operand, Operand, Epilogue], Tensor]:
    """Return the plan's `run` with the fastest algorithm, which the first call determines."""

    def run(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
        tune(plan, a, b, epilogue)
        return plan.run(a, b, epilogue)

    return run


def tune(plan: CublasPlan, a: Operand, b: Operand, epilogue: Epilogue) -> None:
    """Give the plan the fastest algorithm, from the file or by timing; does nothing the second time.

    No tensor of the caller's is written. While a CUDA graph is captured nothing can be timed, and the plan stays.
    """
    if plan.tuned or torch.cuda.is_current_stream_capturing():
        return
    plan.tuned = True
    choices = choices_of(plan.problem.device)
    known = choices.algorithms.get(plan.problem.key)
    if known is not None and plan.adopt(known):
        return
    choices.put(plan.problem.key, _fastest(plan, a, b, epilogue))


def _fastest(plan: CublasPlan, a: Operand, b: Operand, epilogue: Epilogue) -> bytes:
    """Return and adopt the fastest algorithm: the heuristic's first unless another is clearly faster."""
    problem = plan.problem
    scratch = torch.empty_strided(
        (problem.n, problem.m), (problem.result_leading, 1), dtype=problem.result, device=a.codes.device
    ).zero_()
    epilogue = epilogue._replace(out=scratch)
    first = plan.algorithm

    def seconds(algorithm: bytes) -> float:
        return _seconds(plan, a, b, epilogue) if plan.adopt(algorithm) else float("inf")

    times = dict.fromkeys([first, *plan.candidates(CANDIDATES)], float("inf"))
    for _ in range(_ROUNDS):  # in turns: clocks change by more than algorithms differ
        for algorithm in times:
            times[algorithm] = min(times[algorithm], seconds(algorithm))
    best = min(times, key=times.__getitem__)
    if best != first:
        ratios = [seconds(best) / seconds(first) for _ in range(_DUELS)]
        if statistics.median(ratios) > _GAIN:
            best = first
    plan.adopt(best)
    return best


def _seconds(plan: CublasPlan, a: Operand, b: Operand, epilogue: Epilogue) -> float:
    """GPU time of one run, the mean of several that were queued while the GPU was kept waiting."""
    problem = plan.problem
    guess = 2.0 * problem.m * problem.n * problem.k / 500e12  # only how many runs are worth timing
    runs = max(2, min(30, int(_ROUND_SECONDS / max(guess, 1e-6))))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    plan.run(a, b, epilogue)
    torch.cuda._sleep(1_000_000)  # cycles: about 0.5 ms, in which the host queues the runs
    start.record()
    for _ in range(runs):
        plan.run(a, b, epilogue)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3 / runs


class Choices:
    """Algorithms by problem, in a JSON file {problem: hexadecimal bytes}; every change is written at once.

    A file is replaced as a whole, so readers need no lock. Two processes that write at the same instant may lose one
    choice, which is then measured again; a lock would add a dependency (`filelock`) for that alone.
    """

    def __init__(self, path: Path):
        self.path = path
        self.algorithms = self._read()

    def put(self, key: str, algorithm: bytes) -> None:
        """Add a choice to the file, and keep the choices that other processes have added since."""
        self.algorithms = {**self._read(), **self.algorithms, key: algorithm}
        algorithms = {key: code.hex() for key, code in sorted(self.algorithms.items())}
        env.replace_text(self.path, json.dumps(algorithms, indent=1))

    def _read(self) -> dict[str, bytes]:
        if not self.path.exists():
            return {}
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            return {str(key): bytes.fromhex(code) for key, code in content.items()}
        except (ValueError, AttributeError, TypeError) as error:
            warnings.warn(
                f"{self.path} is not a file of tuned algorithms ({error}); it will be replaced", stacklevel=2
            )
            return {}


@functools.cache
def choices_of(device: int) -> Choices:
    """Return the choices for this model of GPU and this version of cuBLASLt."""
    name = f"{torch.cuda.get_device_name(device)}-cublaslt-{library.bindings().get_version()}"
    return Choices(env.cache_file("autotune", name))
