"""docs/architecture.md names files and definitions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, tree

PAGE = ROOT / "docs" / "architecture.md"
FOLDERS = (
    ROOT,
    ROOT / "transformer_engine",
    ROOT / "transformer_engine" / "pytorch",
    ROOT / "transformer_engine" / "jax",
    ROOT / "docs",
)
FILE = re.compile(r"`((?:[\w.]+/)+[\w.]+\.(?:py|md|json))`")
FILE_AND_NAMES = re.compile(FILE.pattern + r" \((?P<names>`\w+`(?:, `\w+`)*)[):]")


def find_file(named: str) -> Path | None:
    result = (folder / named for folder in FOLDERS)
    return next((path for path in result if path.is_file()), None)


def find_definitions(path: Path) -> set[str]:
    """Function, method, class and assignment names in a file."""
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


@pytest.mark.parametrize("named", sorted(set(FILE.findall(PAGE.read_text()))))
def test_a_file_that_the_page_names_exists(named):
    assert find_file(named) is not None


@pytest.mark.parametrize(
    ("named", "names"),
    [(match[1], match["names"]) for match in FILE_AND_NAMES.finditer(PAGE.read_text())],
)
def test_a_file_defines_the_names_that_the_page_lists(named, names):
    path = find_file(named)
    assert path is not None
    assert set(re.findall(r"\w+", names)) <= find_definitions(path)


def test_the_page_is_read():
    assert len(FILE.findall(PAGE.read_text())) > 30
    assert len(list(FILE_AND_NAMES.finditer(PAGE.read_text()))) >= 3
