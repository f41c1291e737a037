"""Choosing a plan's fastest cuBLASLt candidate algorithm: timed once, stored for later processes.

The heuristic is usually right. Tuning is off by default, because two algorithms may add in a different order:
with it, results depend on the measured times. Each choice is one file, for a GPU model, a cuBLASLt version
and a problem. The library checks an algorithm that is read before it is used.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ....common.store import Store
from ..operand import Operand
from . import cublaslt_library as library
from .cublaslt_plan import CublasPlan
from .request import Epilogue

CHOICES = Store(
    "autotune",
    b"TETUNED1",
    "tuned algorithms",
    logger="transformer_engine.autotune",
    remedy="set TE_CACHE_DIR",
    limit=16384,
)
CANDIDATES = 8
_ROUNDS = 3
_DUELS = 9  # of the fastest candidate with the heuristic's first
_ROUND_SECONDS = 1e-3  # GPU time for one candidate in one round or duel
# Another algorithm than the heuristic's first must need at most this share of its time.
_GAIN = 0.98


def tune_plan(plan: CublasPlan) -> Callable[[Operand, Operand, Epilogue], Tensor]:
    """Return the plan's `run` with the fastest algorithm, which the first call determines."""

    def run(a: Operand, b: Operand, epilogue: Epilogue) -> Tensor:
        tune(plan, a, b, epilogue)
        return plan.run(a, b, epilogue)

    return run


def tune(plan: CublasPlan, a: Operand, b: Operand, epilogue: Epilogue) -> None:
    """Give the plan the fastest algorithm, from the file or by timing; does nothing the second time.

    No caller's tensor is written. While a CUDA graph is captured nothing can be timed, and the plan stays.
    """
    if plan.tuned or torch.cuda.is_current_stream_capturing():
        return
    plan.tuned = True
    path = algorithm_file(plan)
    stored = None if path is None else CHOICES.read(path)
    if stored is not None and plan.adopt(stored):
        return
    algorithm = _fastest(plan, a, b, epilogue)
    if path is not None:
        CHOICES.write(path, algorithm)


def _fastest(plan: CublasPlan, a: Operand, b: Operand, epilogue: Epilogue) -> bytes:
    """Return and adopt the fastest algorithm: the heuristic's first unless another is clearly faster."""
    problem = plan.problem
    scratch = torch.empty_strided(
        (problem.n, problem.m),
        (problem.result_leading, 1),
        dtype=problem.result,
        device=a.codes.device,
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
    """GPU time per run, averaged over several that were queued while the GPU was kept waiting."""
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


@functools.cache
def _library_and_gpu(device: int) -> str:
    """What the fastest algorithm depends on besides the problem: GPU model and cuBLASLt version."""
    return f"{torch.cuda.get_device_name(device)} cublaslt {library.bindings().get_version()}"


def algorithm_file(plan: CublasPlan) -> Path | None:
    """Return the file with the algorithm for a plan's problem; None without a cache folder."""
    return CHOICES.path_of(_library_and_gpu(plan.problem.device), plan.problem.key)
