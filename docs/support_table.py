"""Writes the table of docs/support.json into docs/support.md and README.md; --check only compares.

python docs/support_table.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "docs" / "support.md", ROOT / "README.md")
START, END = "<!-- support table -->\n", "<!-- end of support table -->"


def table(support: dict[str, Any]) -> str:
    """The groups of support.json as one Markdown table and a legend."""
    columns = support["columns"]
    lines = [
        f"| | {' | '.join(columns.values())} | |",
        f"| --- |{' --- |' * len(columns)} --- |",
    ]
    for group in support["groups"]:
        lines.append(f"| **{group['title']}** |{' |' * len(columns)} |")
        for row in group["rows"]:
            cells = " | ".join(row[column] for column in columns)
            lines.append(f"| {row['feature']} | {cells} | {row['note']} |")
    legend = "; ".join(f"*{word}*: {meaning}" for word, meaning in support["legend"].items())
    return "\n".join([*lines, "", f"{legend}."]) + "\n"


def updated(page: str, rows: str) -> str:
    """The page with the text between its two markers replaced."""
    before, rest = page.split(START)
    return before + START + rows + END + rest.split(END)[1]


def main() -> int:
    rows = table(json.loads((ROOT / "docs" / "support.json").read_text()))
    stale = [path for path in PAGES if updated(path.read_text(), rows) != path.read_text()]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(
                f"{path.relative_to(ROOT)} is older than docs/support.json; run python docs/support_table.py"
            )
        return 1 if stale else 0
    for path in stale:
        path.write_text(updated(path.read_text(), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
