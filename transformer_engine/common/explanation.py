"""What `explain` answers: which backend every operation of a call chose, and why the others were not taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .dispatch import Verdict, observing, tables


@dataclass(frozen=True)
class Decision:
    """One kind of request to an operation, how often it was made, and every backend's answer in order."""

    operation: str
    request: Any
    count: int
    verdicts: tuple[Verdict, ...]

    @property
    def chosen(self) -> str | None:
        """The backend that was used."""
        return next((verdict.backend for verdict in self.verdicts if verdict.chosen), None)


@dataclass(frozen=True)
class Explanation:
    """The decisions of one call in the order in which they were first made; str() is a readable table."""

    decisions: tuple[Decision, ...]

    def __str__(self) -> str:
        lines: list[str] = []
        for decision in self.decisions:
            lines.append(f"{decision.operation}: {decision.chosen} ({decision.count}x)")
            lines += [f"    not {v.backend}: {v.refusal}" for v in decision.verdicts if not v.chosen]
        return "\n".join(lines)


def explained(call: Callable[[], Any]) -> Explanation:
    """Make the call, and report what every table was asked for and answered."""
    counts: dict[tuple[str, Any], int] = {}

    def see(operation: str, request: Any) -> None:
        counts[operation, request] = counts.get((operation, request), 0) + 1

    with observing(see):
        call()
    return Explanation(
        tuple(
            Decision(operation, request, count, tuple(tables[operation].explain(request)))
            for (operation, request), count in counts.items()
        )
    )
