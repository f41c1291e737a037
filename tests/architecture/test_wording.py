"""Nothing in the tree names the machine it was written on, and nothing is unpickled without an allow-list."""

from __future__ import annotations

import ast
import re
import subprocess

import pytest
from source import ROOT, modules, tree

MACHINE_PATHS = re.compile(r"(?<![\w.])/(work|root|home)/\w")

# With or without quotes; the name of a part of the original ends otherwise.
FROM_AN_INDEX = re.compile(r"pip install[^\n;,]{0,20}transformer[-_]engine\b(?!-)")


def tracked_text_files():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines():
        path = ROOT / line
        if path.suffix in {".py", ".md", ".toml", ".yml", ".json", ".txt", ""} and path.is_file():
            yield path


def test_no_file_names_a_path_of_one_machine():
    for path in tracked_text_files():
        match = MACHINE_PATHS.search(path.read_text(errors="ignore"))
        assert match is None, f"{path.relative_to(ROOT)}: {match}"


def test_no_message_installs_the_package_from_an_index():
    """By its name an index has the original: extras are installed from a checkout (common/extras.py)."""
    for path in tracked_text_files():
        if (ROOT / "benchmarks" / "results") in path.parents:  # records of runs, as they were printed
            continue
        match = FROM_AN_INDEX.search(path.read_text(errors="ignore"))
        assert match is None, f"{path.relative_to(ROOT)}: {match}"


@pytest.mark.parametrize("name", modules())
def test_pickles_are_read_through_an_allow_list_only(name):
    for node in ast.walk(tree(modules()[name])):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
        assert (owner, node.func.attr) not in {("pickle", "load"), ("pickle", "loads")}, (
            f"{name}:{node.lineno}"
        )
        if (owner, node.func.attr) == ("torch", "load"):
            options = {keyword.arg: keyword.value for keyword in node.keywords}
            safe = options.get("weights_only")
            assert isinstance(safe, ast.Constant) and safe.value is True, f"{name}:{node.lineno}"
