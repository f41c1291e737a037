"""Write the table in docs/benchmarks.md of the goals that JAX reaches on an H200; --check only compares.

python docs/jax_goals_table.py [--check]
"""

from __future__ import annotations

import json
import sys
from typing import Any

from generated import ROOT, write

PAGE = ROOT / "docs" / "benchmarks.md"
FIGURES = ROOT / "benchmarks" / "results" / "jax_h200.json"


def table(goals: list[dict[str, Any]]) -> str:
    """One line per goal, in the file's order."""
    lines = ["| case | goal | found | | |", "| --- | ---: | ---: | --- | --- |"]
    for goal in goals:
        measured = "" if goal["found"] is None else f"{goal['found']:.3g}"
        state = {True: "reached", False: "**missed**", None: "not measured"}[goal["reached"]]
        lines.append(f"| {goal['what']} | {goal['goal']} | {measured} | {state} | {goal['note']} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    goals = table(json.loads(FIGURES.read_text())["goals"])
    sys.exit(write(__file__, {PAGE: {"goals in JAX": goals}}))
