"""The table of a conversion: one choice per module, with times, memory and the reason."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ...inspect.observation_report import aligned
from .timing import Comparison

COLUMNS = ("layer", "module", "choice", "ms", "converted ms", "MiB", "converted MiB", "reason")


@dataclass(frozen=True)
class LayerChoice:
    """Choice for one module.

    Attributes:
        name: Module name in the model.
        module: Class and sizes.
        choice: "torch" for the original, "te" for the engine's layer in high precision or under the
            caller's autocast, otherwise the recipe name.
        reason: Reason for the choice.
        costs: Costs for the original and the converted module in the sample; None: not timed.
        converted: The choice that was compared with "torch"; "" if none was.
    """

    name: str
    module: str
    choice: str
    reason: str
    costs: Comparison | None = None
    converted: str = ""

    def cells(self) -> tuple[str, ...]:
        """Cells of a table row, in COLUMNS order."""
        sides = (None, None) if self.costs is None else self.costs
        times = [_number(None if side is None else side.ms) for side in sides]
        saved_bytes = [None if side is None else side.held for side in sides]
        mebibytes = [_number(None if count is None else count / 2**20) for count in saved_bytes]
        return (self.name or "(model)", self.module, self.choice, *times, *mebibytes, self.reason)


@dataclass
class ConversionTable:
    """Choices in a conversion, printed with equal rows of repeated layers as one.

    Attributes:
        rows: One row per module.
        summary: How choices were made, and the whole-model comparison result.
    """

    rows: list[LayerChoice] = field(default_factory=list)
    summary: str = ""

    def __iter__(self) -> Iterator[LayerChoice]:
        return iter(self.rows)

    def __str__(self) -> str:
        groups: dict[tuple[str, ...], list[LayerChoice]] = {}
        for row in self.rows:
            groups.setdefault((re.sub(r"\b\d+\b", "*", row.name), *row.cells()[1:]), []).append(row)
        rows = [
            (_common_name([row.name for row in group]), *group[0].cells()[1:])
            for group in groups.values()
        ]
        return "\n".join([*aligned([COLUMNS, *rows]), self.summary])


def _common_name(names: list[str]) -> str:
    """Name of a module, or several names with * where they differ, and their count."""
    if len(names) == 1:
        return names[0] or "(model)"
    parts = zip(*[name.split(".") for name in names], strict=True)
    return f"{'.'.join([same[0] if len(set(same)) == 1 else '*' for same in parts])} ({len(names)})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
