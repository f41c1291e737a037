"""Functions per 1,000 code lines and small files in any folders, by the rule in `tests/architecture`.

    python benchmarks/granularity.py transformer_engine path/to/site-packages/optax

Folders named test or tests are left out.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `tests`

from tests.architecture.test_granularity import SMALL_FILE_LINES, code_lines


def counts(folder: Path) -> dict[str, int]:
    """Count functions, code lines, files and small files below a folder."""
    totals = {"functions": 0, "lines": 0, "files": 0, "small files": 0}
    for path in folder.rglob("*.py"):
        if {"test", "tests"} & set(path.relative_to(folder).parts):
            continue
        source = path.read_text(encoding="utf-8")
        totals["functions"] += sum(
            isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            for node in ast.walk(ast.parse(source))
        )
        totals["lines"] += code_lines(source)
        totals["files"] += 1
        totals["small files"] += len(source.splitlines()) <= SMALL_FILE_LINES
    return totals


if __name__ == "__main__":
    print("| folder | functions per 1,000 lines | small files |\n| --- | --- | --- |")
    for name in sys.argv[1:]:
        found = counts(Path(name))
        rate = 1000 * found["functions"] / found["lines"]
        share = found["small files"] / found["files"]
        print(
            f"| `{name}` | {rate:.0f} | {found['small files']} of {found['files']} ({share:.0%}) |"
        )
