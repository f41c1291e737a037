"""Results and report of `te doctor --self-test`, for PyTorch and JAX."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

# Backends that do not make a path native: they compute in wider arithmetic than the operands have, or in
# separate steps instead of one kernel.
EMULATING = (
    "decode",
    "decoded",
    "dequantized",
    "widen",
    "reference",
    "emulated",
    "composed",
    "separate",
)
SECONDS = 115.0
COMPILED = "compiled the programs of JAX"  # progress line of a process that waits for its turn
# Half a unit in the last place of E4M3, E5M2 and E2M1, relative to a value, averaged over all values.
ROUNDING_BOUNDS = {"e4m3": 0.05, "e5m2": 0.1, "e2m1": 0.2}


@dataclass(frozen=True)
class SelfTestSizes:
    """Case extents: `large` for a matrix, `small` for few rows, `tokens` for attention."""

    large: int = 4096
    small: int = 16
    tokens: int = 1024


SAMPLE = SelfTestSizes(large=256, small=16, tokens=64)


@dataclass(frozen=True)
class SelfTestResult:
    """A case with one backend.

    Attributes:
        status: "passed", "failed", "unsupported" (for the reason), "left out" (`LEFT_OUT` in
            `pytorch/inspect/self_test_compile.py`), or "not run" (out of time).
        equal: Equal-byte share, for codes and scales.
        error: Largest relative result error in the Frobenius norm.
        reason: Why it failed, is unsupported or was left out.
        milliseconds: Median call time.
        ratio: This time over the framework's time in bfloat16; for casts, over a copy's time.
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
            and any(
                result.status == "passed" and result.backend not in EMULATING for result in found
            )
            for path, found in by_path.items()
        }

    def __add__(self, other: SelfTest) -> SelfTest:
        """One test from the results of two, which ran one after the other."""
        return replace(
            self,
            machine=self.machine | other.machine,
            results=(*self.results, *other.results),
            seconds=self.seconds + other.seconds,
        )

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
        has_gpu = self.machine.get("gpu", "none") != "none"
        lines = [f"{name}: {value}" for name, value in self.machine.items()]
        if not has_gpu:
            lines.append("There is no GPU: the reference and the backends on the CPU were tested.")
        lines += ["", *_table(self.results), ""]
        for result in self.results:
            if result.status == "failed":
                lines.append(
                    f"FAILED {result.path}, {result.case}, {result.backend}: {result.reason}"
                )
        skipped = {result.path for result in self.results if result.status == "not run"}
        without = [
            path for path, passed in self.paths.items() if not passed and path not in skipped
        ]
        if without and has_gpu:
            lines.append(f"no native backend has passed: {', '.join(without)}")
        left_out = {
            f"{r.path}, {r.backend}: {r.reason}" for r in self.results if r.status == "left out"
        }
        lines += [f"left out: {line}" for line in sorted(left_out)]
        if skipped:
            lines.append(f"not run for lack of time, run again: {', '.join(sorted(skipped))}")
        count = sum(result.status == "passed" for result in self.results)
        lines.append(f"{count} passed, {len(self.failed)} failed in {self.seconds:.0f} s")
        return "\n".join(lines)


def difference_reason(equal: float, error: float | None, bound: float | None) -> str:
    """Reason that results are wrong, or "".

    Args:
        equal: Share of equal bytes.
        error: Largest relative error; None if the results are bytes.
        bound: Largest error that passes; None: all bits must be equal.
    """
    if equal == 1.0 if bound is None else error is not None and error <= bound:
        return ""
    limit = "all bits must be equal" if bound is None else f"the limit is {bound:g}"
    return f"{equal:.6f} of the bytes are equal, relative error {error}; {limit}"


def failure_message(error: Exception) -> str:
    """Type and text of an exception, on one line of at most 400 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


def progress_line(results: list[SelfTestResult], elapsed: float) -> str:
    """Path of some results, and how many there are by status."""
    statuses = [result.status for result in results]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
    return f"{elapsed:6.1f} s  {results[0].path}: {counts}"


def _table(results: Iterable[SelfTestResult]) -> list[str]:
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
