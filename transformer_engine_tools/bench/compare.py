"""Comparison between two figure files: each common case's figures and the ratio second / first."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

# GPU time, host time, wall time; memory. Files from other programs use the same keys.
MEASURES = {"gpu_ms": "GPU ms", "cpu_ms": "host ms", "eager_ms": "wall ms", "peak_mib": "peak MiB"}


@dataclass(frozen=True)
class Pair:
    """One case in two files, the figures by measure."""

    case: str
    first: dict[str, float]
    second: dict[str, float]

    @property
    def family(self) -> str:
        return self.case.split("/")[0]

    def ratio(self, measure: str) -> float | None:
        """Compute second / first, below 1 if the second file has the smaller figure; None without both figures."""
        a, b = self.first.get(measure), self.second.get(measure)
        return b / a if a and b else None


Figures = dict[str, dict[str, float]]  # {case: figures}
ENGINES = ("te", "jax")


def read(path: Path) -> dict[str, Figures]:
    """Read {provider: {case: figures}} from a JSON file.

    The file has a list of objects with "case", or an object with such a list as "results".

    Providers are "te" and "jax", each where the file has its figures; rows that name none belong to "te".
    ValueError for another file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a readable JSON file: {error}; give a file that te bench --json wrote"
        ) from None
    rows = content.get("results") if isinstance(content, dict) else content
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and isinstance(row.get("case"), str) for row in rows
    ):
        raise ValueError(
            f"{path} does not hold a list of cases; give a file that te bench --json wrote"
        )
    records = {
        name: {
            row["case"]: _figures(row)
            for row in rows
            if row.get("provider", "te") == name and _figures(row)
        }
        for name in ENGINES
    }
    return {name: figures for name, figures in records.items() if figures}


def _figures(row: dict[str, Any]) -> dict[str, float]:
    values = {name: row.get(name) for name in MEASURES}
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, (int, float))
        and not isinstance(value, bool)
        and 0 <= value <= sys.float_info.max
    }


def pairs(first: dict[str, Figures], second: dict[str, Figures]) -> list[Pair]:
    """Pair the cases in both files, in the first file's order: torch's with torch's and JAX's with JAX's.

    Where no provider is in both files, the first file's provider is paired with the second file's.
    """
    shared = [name for name in first if name in second]
    matches = [(name, name) for name in shared] or [(a, b) for a in first for b in second]
    return [
        Pair(case if len(matches) == 1 else f"{case}, {a}", figures, second[b][case])
        for a, b in matches
        for case, figures in first[a].items()
        if case in second[b]
    ]


def geometric_mean(ratios: Iterable[float | None]) -> float | None:
    """Geometric mean of the ratios that are not None."""
    logarithms = [math.log(ratio) for ratio in ratios if ratio is not None]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else None


def print_comparison(console: Console, first: Path, second: Path) -> None:
    """Print a table with the ratios and their geometric means by family; raise ValueError without common cases."""
    shared = pairs(read(first), read(second))
    if not shared:
        raise ValueError(
            f"{first} and {second} have no case in common; run the same families for both"
        )
    console.print(f"A = {first}\nB = {second}\nratios are B / A: below 1, B is faster or smaller")
    table = Table("case", title="B / A", title_justify="left")
    for heading in MEASURES.values():
        table.add_column(f"{heading} A", justify="right")
        table.add_column("B", justify="right")
        table.add_column("ratio", justify="right")
    for pair in shared:
        cells: list[str] = []
        for measure in MEASURES:
            figures = (pair.first.get(measure), pair.second.get(measure))
            cells += ["" if figure is None else f"{figure:.4g}" for figure in figures]
            cells.append(_ratio(pair.ratio(measure)))
        table.add_row(pair.case, *cells)
    console.print(table)
    table = Table("family", "cases", title="geometric mean of B / A", title_justify="left")
    for heading in MEASURES.values():
        table.add_column(heading, justify="right")
    names = dict.fromkeys(pair.family for pair in shared)
    groups = {name: [pair for pair in shared if pair.family == name] for name in names}
    if len(groups) > 1:
        groups["all"] = shared
    for name, members in groups.items():
        means = (geometric_mean(pair.ratio(measure) for pair in members) for measure in MEASURES)
        table.add_row(name, str(len(members)), *map(_ratio, means))
    console.print(table)


def _ratio(value: float | None) -> str:
    if value is None:
        return ""
    return f"[{'green' if value <= 1 else 'red'}]{value:.3f}[/]"
