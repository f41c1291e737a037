"""Write the table of docs/compositions.json into docs/verify.md; --check only compares.

python docs/compositions_table.py [--check]
"""

from __future__ import annotations

import json
import sys
from typing import Any

from generated import ROOT, write

PAGE = ROOT / "docs" / "verify.md"
COLUMNS = {
    "ranks": "ranks",
    "tp": "tensor parallel",
    "sp": "sequence parallel",
    "cp": "context parallel",
    "ep": "experts",
    "fsdp": "FSDP2",
    "recipe": "recipe",
    "recompute": "recomputation",
    "graphs": "graphs",
    "outcome": "outcome",
}


def table(compositions: list[dict[str, Any]]) -> str:
    """Return the compositions as a Markdown table."""
    lines = [f"| {' | '.join(COLUMNS.values())} |", f"|{' --- |' * len(COLUMNS)}"]
    for row in compositions:
        cells = [
            {True: "yes", False: "no"}[row[n]] if isinstance(row[n], bool) else str(row[n])
            for n in COLUMNS
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    rows = table(json.loads((ROOT / "docs" / "compositions.json").read_text())["compositions"])
    sys.exit(write(__file__, {PAGE: {"compositions": rows}}))
