"""Write the table of docs/support.json into docs/support.md; --check only compares.

python docs/support_table.py [--check]
"""

from __future__ import annotations

import json
import sys
from typing import Any

from generated import ROOT, write

PAGE = ROOT / "docs" / "support.md"


def table(support: dict[str, Any]) -> str:
    """Groups in support.json as one Markdown table and a legend."""
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


if __name__ == "__main__":
    rows = table(json.loads((ROOT / "docs" / "support.json").read_text()))
    sys.exit(write(__file__, {PAGE: {"support table": rows}}))
