"""Result of `explain`: the backend that each operation in a call uses, and why the others are unsupported."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .dispatch import Verdict, observing, tables


def chosen_name(verdicts: Iterable[Verdict]) -> str | None:
    """Name of the chosen backend."""
    return next((verdict.backend for verdict in verdicts if verdict.chosen), None)


@dataclass(frozen=True)
class Decision:
    """A request to an operation, its call count, and the verdict on every backend, in order.

    Attributes:
        operation: Name of the operation, such as "gemm".
        request: Properties of the call that determine the backend.
        count: Number of calls with this request.
        verdicts: One verdict per backend, in order of preference.
    """

    operation: str
    request: Any
    count: int
    verdicts: tuple[Verdict, ...]

    @property
    def chosen(self) -> str | None:
        """Name of the backend that was used."""
        return chosen_name(self.verdicts)


@dataclass(frozen=True)
class PassStepReport:
    """One step in a layer's pass.

    Attributes:
        step: The step as text: results, operation, inputs and settings.
        results: Dtype and shape of each result; codes with their format.
        backends: The operations that the step runs, with the chosen one: "gemm: cublaslt".
    """

    step: str
    results: tuple[str, ...]
    backends: tuple[str, ...]


@dataclass(frozen=True)
class PassReport:
    """The forward or backward pass of a layer: its steps and, for a forward pass, the buffers that it saves.

    Attributes:
        name: Name of the pass.
        steps: Steps in execution order.
        saved: Names of the buffers that the forward pass saves for the backward pass.
    """

    name: str
    steps: tuple[PassStepReport, ...]
    saved: tuple[str, ...]

    def __str__(self) -> str:
        lines = [self.name]
        for report in self.steps:
            lines.append(f"    {report.step}")
            lines.append(f"        {'; '.join((*report.results, *report.backends))}")
        if self.saved:
            lines.append(f"    saved: {', '.join(self.saved)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """The decisions in one call in the order in which they were first made; str() is a readable table.

    Attributes:
        decisions: The choice of every table.
        passes: The passes of the call's layers with their steps, if `explain` was called with `steps`.
        notes: Optimizations that the call did without, each with the reason.
    """

    decisions: tuple[Decision, ...]
    passes: tuple[PassReport, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines: list[str] = [*self.notes, *[str(report) for report in self.passes]]
        for decision in self.decisions:
            lines.append(f"{decision.operation}: {decision.chosen} ({decision.count}x)")
            lines += [f"    not {v.backend}: {v.reason}" for v in decision.verdicts if not v.chosen]
        return "\n".join(lines)


# Notes for the active explanations, innermost last; a dict's keys are in order and distinct.
_notes: list[dict[str, None]] = []


def is_explaining() -> bool:
    """Whether an explanation is active, which collects notes."""
    return bool(_notes)


def note(text: str) -> None:
    """Add a note to every active explanation."""
    for notes in _notes:
        notes[text] = None


def explain_call(call: Callable[[], Any]) -> Explanation:
    """Run the call and report its requests to every table, with their verdicts, and its notes."""
    notes: dict[str, None] = {}
    counts: dict[tuple[str, Any], int] = {}

    def see(operation: str, request: Any) -> None:
        counts[operation, request] = counts.get((operation, request), 0) + 1

    _notes.append(notes)
    try:
        with observing(see):
            call()
    finally:
        _notes[:] = [collected for collected in _notes if collected is not notes]
    return Explanation(
        tuple(
            Decision(operation, request, count, tuple(tables[operation].explain(request)))
            for (operation, request), count in counts.items()
        ),
        notes=tuple(notes),
    )
