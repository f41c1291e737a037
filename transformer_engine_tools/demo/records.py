"""A run's records, one line in metrics.jsonl per step, and their summary."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from .config import RunConfig


@dataclass(frozen=True)
class Progress:
    """Training progress: one record in metrics.jsonl, losses and seconds by the run's name."""

    step: int
    learning_rate: float
    loss: dict[str, float]
    seconds: dict[str, float]
    validation: dict[str, float] | None = None

    def as_json(self) -> str:
        record = {name: value for name, value in vars(self).items() if value is not None}
        return json.dumps(record) + "\n"


def read_metrics(path: Path, last_step: int | None = None) -> list[Progress]:
    """Read the records in a metrics.jsonl up to last_step; a last line truncated by a crash is ignored.

    Raises:
        ValueError: Any other line is damaged; the message contains the file and the line.
    """
    if not path.is_file():
        return []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}; {WITHOUT_METRICS}") from None
    records = []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if line.endswith("\n"):
            records.append(_record(path, number, line))
    return [record for record in records if last_step is None or record.step <= last_step]


WITHOUT_METRICS = "remove the file or its damaged lines: the curve loses those steps, the training continues exactly"


def _record(path: Path, number: int, line: str) -> Progress:
    """Parse the record in a line from a metrics file."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"line {number} of {path} is not JSON ({error}); {WITHOUT_METRICS}"
        ) from None
    kinds = {"step": int, "learning_rate": float, "loss": dict, "seconds": dict, "validation": dict}
    fields = content if isinstance(content, dict) else {}
    optional = {"validation": {}}
    wrong = []
    for name, kind in kinds.items():
        value = {**optional, **fields}.get(name)
        numbers = value.values() if isinstance(value, dict) else ()
        valid = isinstance(value, kind) and not isinstance(value, bool)
        if not valid or not all(isinstance(number, (int, float)) for number in numbers):
            wrong.append(name)
    wrong += [name for name in fields if name not in kinds]
    if wrong:
        raise ValueError(f"line {number} of {path} has no good {wrong[0]!r}; {WITHOUT_METRICS}")
    return Progress(**fields)


@dataclass(frozen=True)
class RunResult:
    """Result of a run: losses in nats per byte, speed over all its steps without evaluation."""

    name: str
    train: float
    validation: float
    tokens_per_second: float
    seconds: float


def summarize(config: RunConfig, history: list[Progress]) -> list[RunResult]:
    """Compute one RunResult per run; the training loss is the mean over the last twentieth of the steps (at least ten).

    The tokens per second come from the median step, because the first steps compile kernels.
    """
    last = history[-max(10, len(history) // 20) :]
    final = history[-1].validation or {}
    results = []
    for name in config.runs:
        seconds = [record.seconds[name] for record in history]
        results.append(
            RunResult(
                name=name,
                train=sum(record.loss[name] for record in last) / len(last),
                validation=final.get(name, float("nan")),
                tokens_per_second=config.tokens_per_step / statistics.median(seconds),
                seconds=sum(seconds),
            )
        )
    return results
