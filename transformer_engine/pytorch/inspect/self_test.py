"""Self-test for this machine: every backend that runs here against a reference, with times and versions."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ...common.dispatch import Table, Unsupported, tables, use_backend
from ...common.kernels import launch
from ...common.self_test import (
    SAMPLE,
    SECONDS,
    SelfTest,
    SelfTestResult,
    SelfTestSizes,
    difference_reason,
    failure_message,
    progress_line,
)
from ..quantization import emulate
from ..runtime import self_tested
from ..runtime.device import current_hardware, has_cuda
from .self_test_cases import cases
from .self_test_compile import LEFT_OUT, compile_ahead, first_request
from .self_test_products import SelfTestCase, Tensors

__all__ = ["SelfTest", "SelfTestResult", "SelfTestSizes", "self_test"]

# The backend of the operation that the others are compared with.
REFERENCES = {"gemm_epilogue": "composed", "fp8_attention": "emulated"}
MOST_RUNS, TIMED_SECONDS = 20, 0.02
CYCLES = 1.9e9  # torch.cuda._sleep cycles per second; a GPU with a slower clock sleeps longer


def self_test(
    sizes: SelfTestSizes | None = None,
    seconds: float = SECONDS,
    progress: Callable[[str], None] = lambda line: None,
) -> SelfTest:
    """Compare every backend that supports the cases on this machine with a reference.

    On a GPU, other processes first compile the Triton kernels, and the result is stored:
    `runtime.self_tested.untested_reason(path)` returns it.

    Args:
        sizes: Case extents; by default large ones on a GPU and a sample on a CPU.
        seconds: Time after which the remaining cases are reported as not run.
        progress: Called with a line per path, before and after its cases.
    """
    device = (
        torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")
    )
    if sizes is None:
        sizes = SelfTestSizes() if has_cuda() else SAMPLE
    start = time.perf_counter()
    if has_cuda() and launch.unavailable_reason(current_hardware()) is None:
        compile_ahead(sizes, progress)
    results: list[SelfTestResult] = []
    times: dict[Any, float] = {}
    path, first = None, 0
    with emulate():
        for case in cases(device, sizes):
            elapsed = time.perf_counter() - start
            if case.path != path:
                if results[first:]:
                    progress(progress_line(results[first:], elapsed))
                path, first = case.path, len(results)
                progress(f"testing {case.path}")
            if elapsed > seconds:
                results.append(SelfTestResult(case.path, case.name, "all", "not run"))
            else:
                with self_tested.testing(case.path):
                    results += _examine_case(case, device, times)
    if results[first:]:
        progress(progress_line(results[first:], time.perf_counter() - start))
    test = SelfTest(self_tested.machine_facts(), tuple(results), time.perf_counter() - start)
    if has_cuda():
        self_tested.save(test.paths)
        torch.cuda.empty_cache()  # JAX allocates next, in another process
    return test


def _examine_case(
    case: SelfTestCase, device: torch.device, times: dict[Any, float]
) -> list[SelfTestResult]:
    """Run a case with every backend for its operation."""
    table, reference = tables[case.operation], REFERENCES.get(case.operation, "reference")
    try:
        request = first_request(case)
    except Exception as error:
        # a fault in the backend that the table chooses is a result in this test
        return [
            SelfTestResult(case.path, case.name, "chosen", "failed", reason=failure_message(error))
        ]
    if request is None:
        reason = f"{case.operation} is not used on this machine"
        return [SelfTestResult(case.path, case.name, reference, "unsupported", reason=reason)]
    results, expected = [], None
    for backend in table.candidates(request):
        if backend.name == reference and case.expected is None:
            continue
        reason, status = backend.rejection_reason(request), "unsupported"
        if reason is None and backend.name in LEFT_OUT:
            reason, status = LEFT_OUT[backend.name], "left out"
        if reason is not None:
            results.append(
                SelfTestResult(case.path, case.name, backend.name, status, reason=reason)
            )
            continue
        try:
            expected = _expected_results(case, backend.name, reference, expected)
            results.append(_compare_results(case, table, backend.name, expected, device, times))
        except Exception as error:  # every library fault is a result in this test
            results.append(
                SelfTestResult(
                    case.path, case.name, backend.name, "failed", reason=failure_message(error)
                )
            )
    return results


def _expected_results(
    case: SelfTestCase, backend: str, reference: str, computed: Tensors | None
) -> Tensors:
    """Expected results: the case's own, or the reference's; `computed` are another backend's."""
    steps = case.expected is not None and case.operation not in ("quantize", "gemm")
    if computed is not None and not steps:
        return computed
    if case.expected is None:
        with use_backend(**{case.operation: reference}):
            return case.compute()
    if not steps:
        return case.expected()
    # The producer's own values, quantized by the reference.
    with use_backend(
        **{case.operation: backend}, quantize="reference", absolute_maximum="reference"
    ):
        return case.expected()


def _compare_results(
    case: SelfTestCase,
    table: Table[Any],
    backend: str,
    expected: Tensors,
    device: torch.device,
    times: dict[Any, float],
) -> SelfTestResult:
    with use_backend(**{table.operation: backend}):
        try:
            results = case.compute()
        except Unsupported as error:  # another request of the case, such as a gradient
            if error.forced != table.operation:
                raise
            return SelfTestResult(case.path, case.name, backend, "unsupported", reason=str(error))
        equal, error = _equal(results, expected), _error(results, expected)
        elapsed = _milliseconds(case.compute, device)
    ratio = None
    if case.baseline is not None:
        key = case.path, case.name
        if key not in times:
            times[key] = _milliseconds(case.baseline, device)
        ratio = elapsed / times[key]
    reason = difference_reason(equal, error, case.bound)
    status = "failed" if reason else "passed"
    reported = equal if case.bound is None else None
    return SelfTestResult(
        case.path, case.name, backend, status, reason, reported, error, elapsed, ratio
    )


def _equal(results: Tensors, expected: Tensors) -> float:
    """Equal-byte share; 0 for different numbers, shapes or dtypes."""
    if [(x.shape, x.dtype) for x in results] != [(x.shape, x.dtype) for x in expected]:
        return 0.0
    same = total = 0
    for x, y in zip(results, expected, strict=True):
        left, right = (t.contiguous().reshape(-1).view(torch.uint8) for t in (x, y))
        same += int((left == right).sum())
        total += left.numel()
    return same / max(total, 1)


def _error(results: Tensors, expected: Tensors) -> float | None:
    """Largest relative result error in the Frobenius norm; None if they are bytes, not numbers."""
    errors = []
    for x, y in zip(results, expected, strict=True):
        if x.dtype.is_floating_point and x.numel():
            difference = (x.double() - y.double()).norm() / y.double().norm().clamp(min=1e-30)
            errors.append(float("inf") if difference.isnan() else float(difference))
    return max(errors) if errors else None


def _milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Median milliseconds per call: between two events on a GPU, wall time on a CPU."""
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    host = time.perf_counter() - begin
    if device.type != "cuda":
        return 1e3 * host
    torch.cuda.synchronize()
    runs = max(3, min(MOST_RUNS, int(TIMED_SECONDS / max(time.perf_counter() - begin, 1e-6))))
    times = []
    for _ in range(runs):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # All launches are queued while the stream sleeps, so that the host's time does not count.
        torch.cuda._sleep(int(min(2.5 * host + 2e-4, 0.04) * CYCLES))
        first.record()
        call()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return sorted(times)[runs // 2]
