"""Write the tables of docs/environment.md from transformer_engine/common/env.py; --check only compares.

python docs/environment_table.py [--check]
"""

from __future__ import annotations

import sys

from generated import ROOT, write

from transformer_engine.common.env import GROUPS, Variable

PAGE = ROOT / "docs" / "environment.md"
ACCEPTED = "Accepted; "
TITLES = {
    "recipes": "Defaults of recipes, read once at import",
    "quantization": "Quantization",
    "attention": "Attention",
    "layers": "Layers",
    "platform": "The process",
}


def value(row: Variable, listing: object) -> str:
    """Return a value in shell syntax."""
    if listing is None:
        return "unset"
    text = str(int(listing)) if row.kind is bool and isinstance(listing, bool) else str(listing)
    return f"`{text}`" if text else "empty"


def values(row: Variable) -> str:
    """Valid values for a variable."""
    if row.kind is bool:
        return "`0`, `1`"
    if row.kind is int:
        return "an integer"
    return (
        "any text"
        if row.choices is None
        else ", ".join(value(row, choice) for choice in row.choices)
    )


def read() -> str:
    """One table per group, listing the variables that the package reads."""
    parts = []
    for group, rows in GROUPS.items():
        saved = [row for row in rows if not row.meaning.startswith(ACCEPTED)]
        lines = [
            f"### {TITLES[group]}",
            "",
            "| variable | values | unset | meaning |",
            "|" + " --- |" * 4,
        ]
        lines += [
            f"| `{r.name}` | {values(r)} | {value(r, r.default)} | {r.meaning} |" for r in saved
        ]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def no_effect_table() -> str:
    """Table with the variables that are accepted without effect."""
    saved = [row for rows in GROUPS.values() for row in rows if row.meaning.startswith(ACCEPTED)]
    lines = ["| variable | reason that it has no effect |", "| --- | --- |"]
    lines += [f"| `{row.name}` | {row.meaning.removeprefix(ACCEPTED)} |" for row in saved]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(write(__file__, {PAGE: {"variables": read(), "accepted": no_effect_table()}}))
