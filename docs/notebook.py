"""Write docs/guides/fp8_first_principles.ipynb from docs/first_principles.md; --check only compares.

python docs/notebook.py [--check | --pictures]

`--pictures` runs the cells in docs/images, where the page's pictures are, and prints the cells' outputs.
"""

from __future__ import annotations

import json
import os
import re
import sys

from generated import ROOT

PAGE = ROOT / "docs" / "first_principles.md"
NOTEBOOK = ROOT / "docs" / "guides" / "fp8_first_principles.ipynb"
BLOCK = re.compile(r"```(\w*)\n(.*?)```\n?", re.DOTALL)
ONLY_IN_SCRIPTS = re.compile(r"^plt\.switch_backend\(.*\n", re.MULTILINE)


def cells(page: str) -> list[tuple[str, str]]:
    """Return the (type, source) of the notebook's cells: text without outputs and links, and code."""
    found: list[tuple[str, str]] = []
    end = 0
    for block in BLOCK.finditer(page):
        found.append(("markdown", page[end : block.start()]))
        if block[1] == "python":
            found.append(("code", ONLY_IN_SCRIPTS.sub("", block[2])))
        end = block.end()
    found.append(("markdown", page[end:]))
    plain = [
        (kind, re.sub(r"!\[.*?\]\(.*?\)\n|\[(.*?)\]\(.*?\)", r"\1", text) if kind == "markdown" else text)
        for kind, text in found
    ]
    return [(kind, text.strip()) for kind, text in plain if text.strip()]


def notebook(page: str) -> str:
    """Return the notebook of a page as JSON."""
    written = []
    for number, (kind, source) in enumerate(cells(page)):
        outputs = {"execution_count": None, "outputs": []} if kind == "code" else {}
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source.splitlines(True)}
        written.append({**cell, **outputs})
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return (
        json.dumps({"cells": written, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, indent=1)
        + "\n"
    )


def main() -> int:
    """Write, check or run; return the exit status."""
    page = PAGE.read_text()
    if "--pictures" in sys.argv[1:]:
        os.chdir(ROOT / "docs" / "images")
        names: dict[str, object] = {}
        for block in BLOCK.finditer(page):
            if block[1] == "python":
                print("---", flush=True)
                exec(compile(block[2], PAGE.name, "exec"), names)
        return 0
    fresh = notebook(page)
    if "--check" in sys.argv[1:]:
        stale = not NOTEBOOK.is_file() or NOTEBOOK.read_text() != fresh
        if stale:
            print(f"{NOTEBOOK.relative_to(ROOT)} is out of date; run python docs/notebook.py")
        return int(stale)
    NOTEBOOK.parent.mkdir(exist_ok=True)
    NOTEBOOK.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
