"""Write docs/guides/fp8_first_principles.ipynb, with its cell outputs, from docs/first_principles.md.

`--check` compares the cells without running them, and requires an output from each cell that prints or draws.

python docs/notebook.py [--check | --pictures]

`--pictures` runs the cells in docs/images, where the page's pictures are, and prints the cells' outputs.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import sys
import tempfile
from typing import Any

from generated import ROOT

PAGE = ROOT / "docs" / "first_principles.md"
NOTEBOOK = ROOT / "docs" / "guides" / "fp8_first_principles.ipynb"
BLOCK = re.compile(r"```(\w*)\n(.*?)```\n?", re.DOTALL)
SHOWS = re.compile(r"\bprint\(|plt\.subplots\(")
DOTS_PER_INCH = 80
ONLY_IN_SCRIPTS = re.compile(r"^plt\.switch_backend\(.*\n", re.MULTILINE)


def cells(page: str) -> list[tuple[str, str]]:
    """(type, source) for the notebook's cells: text without outputs and links, and code."""
    cell_sources: list[tuple[str, str]] = []
    end = 0
    for block in BLOCK.finditer(page):
        cell_sources.append(("markdown", page[end : block.start()]))
        if block[1] == "python":
            cell_sources.append(("code", ONLY_IN_SCRIPTS.sub("", block[2])))
        end = block.end()
    cell_sources.append(("markdown", page[end:]))
    plain = [
        (
            kind,
            re.sub(r"!\[.*?\]\(.*?\)\n|\[(.*?)\]\(.*?\)", r"\1", text)
            if kind == "markdown"
            else text,
        )
        for kind, text in cell_sources
    ]
    return [(kind, text.strip()) for kind, text in plain if text.strip()]


def run_cells(sources: list[str]) -> list[list[dict[str, Any]]]:
    """Run the code cells in sequence, and return what each prints and draws as outputs of a notebook."""
    from matplotlib import pyplot

    pyplot.switch_backend("Agg")
    names: dict[str, Any] = {}
    cell_outputs: list[list[dict[str, Any]]] = []
    for source in sources:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, PAGE.name, "exec"), names)
        outputs: list[dict[str, Any]] = []
        if printed.getvalue():
            text = printed.getvalue().splitlines(True)
            outputs.append({"name": "stdout", "output_type": "stream", "text": text})
        for number in pyplot.get_fignums():
            picture = io.BytesIO()
            pyplot.figure(number).savefig(picture, format="png", dpi=DOTS_PER_INCH)
            data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
            outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
        pyplot.close("all")
        cell_outputs.append(outputs)
    return cell_outputs


def notebook(page: str, outputs: list[list[dict[str, Any]]]) -> str:
    """A page's notebook as JSON, with code cell outputs."""
    written: list[dict[str, Any]] = []
    for number, (kind, source) in enumerate(cells(page)):
        cell: dict[str, Any] = {
            "cell_type": kind,
            "id": f"cell-{number}",
            "metadata": {},
            "source": source.splitlines(True),
        }
        if kind == "code":
            count = sum(one["cell_type"] == "code" for one in written)
            cell |= {"execution_count": count + 1, "outputs": outputs[count]}
        written.append(cell)
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return (
        json.dumps(
            {"cells": written, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, indent=1
        )
        + "\n"
    )


def read_stored_outputs() -> dict[str, list[dict[str, Any]]]:
    """{code cell source: its outputs} in the stored notebook."""
    if not NOTEBOOK.is_file():
        return {}
    recognized = [
        cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]
    return {"".join(cell["source"]): cell["outputs"] for cell in recognized}


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
    sources = [source for kind, source in cells(page) if kind == "code"]
    if "--check" in sys.argv[1:]:
        stored = read_stored_outputs()
        outputs = [stored.get(source, []) for source in sources]
        silent = [
            source
            for source, listing in zip(sources, outputs, strict=True)
            if SHOWS.search(source) and not listing
        ]
        stale = bool(silent) or NOTEBOOK.read_text() != notebook(page, outputs)
        if stale:
            print(f"{NOTEBOOK.relative_to(ROOT)} is out of date; run python docs/notebook.py")
        return int(stale)
    NOTEBOOK.parent.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
    ):  # cells write their pictures here
        NOTEBOOK.write_text(notebook(page, run_cells(sources)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
