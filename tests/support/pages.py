"""A documentation page's Python examples, run one after the other as a reader would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"


def examples(page: str, language: str = "python") -> list[str]:
    """Code blocks from a page in a language, such as "python-clients" for examples that need a client."""
    parts = (DOCS / page).read_text().split(f"```{language}\n")[1:]
    return [part.split("```")[0] for part in parts]


def run(page: str) -> dict[str, Any]:
    """Run a page's examples in sequence and return the names that they define."""
    names: dict[str, Any] = {}
    for number, example in enumerate(examples(page)):
        exec(compile(example, f"{page}, example {number}", "exec"), names)
    return names
