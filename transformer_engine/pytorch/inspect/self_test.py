"""Self-test for this machine: every backend that runs here against a reference, with times and versions."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from ...common.dispatch import Table, Unsupported, tables, use_backend
from ...common.kernels import launch
from ..primitives.gemm import DEQUANTIZING
from ..quantization import emulate
from ..runtime import self_tested
from ..runtime.device import current_hardware, has_cuda
from .self_test_cases import cases
from .self_test_compile import LEFT_OUT, compile_ahead, first_request
from .self_test_products import SAMPLE, SelfTestCase, SelfTestSizes, Tensors

# The backend of the operation that the others are compared with.
REFERENCES = {"gemm_epilogue": "composed", "fp8_attention": "emulated"}
# Backends that compute in wider arithmetic than the operands have: correct, but without low-precision instructions.
EMULATING = (*DEQUANTIZING, "emulated", "composed")
MOST_RUNS, TIMED_SECONDS = 20, 0.02
SECONDS = 110.0
CYCLES = 1.9e9  # torch.cuda._sleep cycles per second; a GPU with a slower clock sleeps longer


@dataclass(frozen=True)
class SelfTestResult:
    """A case with one backend.

    Attributes:
        status: "passed", "failed", "unsupported" (for the reason), "left out" (see `LEFT_OUT`), or "not run" (out of
            time).
        equal: Equal-byte share, for codes and scales.
        error: Largest relative result error in the Frobenius norm.
        reason: Why it failed, is unsupported or was left out.
        milliseconds: Median call time.
        ratio: This time over torch's time in bfloat16; for casts, over a copy's time.
    """

    path: str
    case: str
    backend: str
    status: Literal["passed", "failed", "unsupported", "left out", "not run"]
    reason: str = ""
    equal: float | None = None
    error: float | None = None
    milliseconds: float | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class SelfTest:
    """Self-test results, and the machine."""

    machine: dict[str, str]
    results: tuple[SelfTestResult, ...]
    seconds: float

    @property
    def failed(self) -> tuple[SelfTestResult, ...]:
        """Results that differ from the reference, and calls that raised."""
        return tuple(result for result in self.results if result.status == "failed")

    @property
    def paths(self) -> dict[str, bool]:
        """Whether each path has passed: all cases ran, none failed, and one backend was native."""
        by_path: dict[str, list[SelfTestResult]] = {}
        for result in self.results:
            by_path.setdefault(result.path, []).append(result)
        return {
            path: all(result.status in ("passed", "unsupported", "left out") for result in found)
            and any(result.status == "passed" and result.backend not in EMULATING for result in found)
            for path, found in by_path.items()
        }

    def as_dict(self) -> dict[str, Any]:
        """The test as plain data."""
        return {
            "machine": self.machine,
            "seconds": self.seconds,
            "paths": self.paths,
            "results": [asdict(result) for result in self.results],
        }

    def report(self) -> str:
        """Text to paste into a report: versions, a table, and failure reasons."""
        lines = [f"{name}: {value}" for name, value in self.machine.items()]
        if self.machine["gpu"] == "none":
            lines.append("There is no GPU: the reference and torch's backends on the CPU were tested.")
        lines += ["", *_table(self.results), ""]
        for result in self.results:
            if result.status == "failed":
                lines.append(f"FAILED {result.path}, {result.case}, {result.backend}: {result.reason}")
        without = [path for path, passed in self.paths.items() if not passed]
        if without and self.machine["gpu"] != "none":
            lines.append(f"no native backend has passed: {', '.join(without)}")
        left_out = {f"{r.path}, {r.backend}: {r.reason}" for r in self.results if r.status == "left out"}
        lines += [f"left out: {line}" for line in sorted(left_out)]
        skipped = {result.path for result in self.results if result.status == "not run"}
        if skipped:
            lines.append(f"not run for lack of time, run again: {', '.join(sorted(skipped))}")
        count = sum(result.status == "passed" for result in self.results)
        lines.append(f"{count} passed, {len(self.failed)} failed in {self.seconds:.0f} s")
        return "\n".join(lines)


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
    device = torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")
    if sizes is None:
        sizes = SelfTestSizes() if has_cuda() else SAMPLE
    start = time.perf_counter()
    if has_cuda() and launch.missing(current_hardware()) is None:
        compile_ahead(sizes, progress)
    results: list[SelfTestResult] = []
    times: dict[Any, float] = {}
    path, first = None, 0
    with emulate():
        for case in cases(device, sizes):
            elapsed = time.perf_counter() - start
            if case.path != path:
                _report_path(results[first:], elapsed, progress)
                path, first = case.path, len(results)
                progress(f"testing {case.path}")
            if elapsed > seconds:
                results.append(SelfTestResult(case.path, case.name, "all", "not run"))
            else:
                with self_tested.testing(case.path):
                    results += _examine_case(case, device, times)
    _report_path(results[first:], time.perf_counter() - start, progress)
    test = SelfTest(self_tested.machine_facts(), tuple(results), time.perf_counter() - start)
    if has_cuda():
        self_tested.save(test.paths)
    return test


def _report_path(results: list[SelfTestResult], elapsed: float, progress: Callable[[str], None]) -> None:
    """Report how many results a path has by status."""
    if results:
        statuses = [result.status for result in results]
        counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
        progress(f"{elapsed:6.1f} s  {results[0].path}: {counts}")


def _examine_case(case: SelfTestCase, device: torch.device, times: dict[Any, float]) -> list[SelfTestResult]:
    """Run a case with every backend for its operation."""
    table, reference = tables[case.operation], REFERENCES.get(case.operation, "reference")
    try:
        request = first_request(case)
    except Exception as error:  # a fault in the backend that the table chooses is a result in this test
        return [SelfTestResult(case.path, case.name, "chosen", "failed", reason=_message(error))]
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
            results.append(SelfTestResult(case.path, case.name, backend.name, status, reason=reason))
            continue
        try:
            expected = _expected_results(case, backend.name, reference, expected)
            results.append(_compare_results(case, table, backend.name, expected, device, times))
        except Exception as error:  # every library fault is a result in this test
            results.append(
                SelfTestResult(case.path, case.name, backend.name, "failed", reason=_message(error))
            )
    return results


def _expected_results(case: SelfTestCase, backend: str, reference: str, computed: Tensors | None) -> Tensors:
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
    with use_backend(**{case.operation: backend}, quantize="reference", absolute_maximum="reference"):
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
    passed = equal == 1.0 if case.bound is None else error is not None and error <= case.bound
    reason = ""
    if not passed:
        limit = "all bits must be equal" if case.bound is None else f"the limit is {case.bound:g}"
        reason = f"{equal:.6f} of the bytes are equal, relative error {error}; {limit}"
    status = "passed" if passed else "failed"
    reported = equal if case.bound is None else None
    return SelfTestResult(case.path, case.name, backend, status, reason, reported, error, elapsed, ratio)


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


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def _table(results: tuple[SelfTestResult, ...]) -> list[str]:
    """Table lines for the backends that ran."""
    rows = [("path", "case", "backend", "", "bits", "error", "ms", "x bf16")]
    for result in results:
        if result.status in ("passed", "failed"):
            rows.append(
                (
                    result.path,
                    result.case,
                    result.backend,
                    "ok" if result.status == "passed" else "FAIL",
                    _number(result.equal, ".4%"),
                    _number(result.error, ".1e"),
                    _number(result.milliseconds, ".3f"),
                    _number(result.ratio, ".2f"),
                )
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
