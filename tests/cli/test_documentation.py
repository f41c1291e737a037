"""The documentation says what the program does: tables and defaults are those of the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from transformer_engine.cli.demo.config import CPU_SIZES, CUDA_SIZES
from transformer_engine.common import env

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {"sequence": "--seq", "learning_rate": "--lr"}


@pytest.mark.parametrize("script", ["support_table.py", "performance_table.py", "environment_table.py"])
def test_a_generated_page_is_that_of_its_source(script: str):
    result = subprocess.run(
        [sys.executable, ROOT / "docs" / script, "--check"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_page_of_environment_variables_names_each_once():
    page = (ROOT / "docs" / "environment.md").read_text()
    named = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert sorted(named) == sorted(env.VARIABLES)


@pytest.mark.parametrize("name", CPU_SIZES)
def test_the_documented_defaults_are_those_of_the_program(name: str):
    option = OPTIONS.get(name, f"--{name}")
    rows = (ROOT / "docs" / "cli.md").read_text().splitlines()
    (row,) = [line for line in rows if line.startswith(f"| `{option}`")]
    assert [cell.strip() for cell in row.split("|")[3:5]] == [str(CPU_SIZES[name]), str(CUDA_SIZES[name])]


@pytest.mark.parametrize(
    "page", ["README.md", *(f"docs/{name}" for name in ("quickstart.md", "cli.md", "index.md"))]
)
def test_every_relative_link_leads_to_a_file(page: str):
    path = ROOT / page
    targets = [part.split(")")[0] for part in path.read_text().split("](")[1:]]
    missing = [
        target
        for target in targets
        if "://" not in target and not (path.parent / target.split("#")[0]).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("page", ["training.md"])
def test_the_examples_of_a_page_run_one_after_the_other(page: str):
    blocks = (ROOT / "docs" / page).read_text().split("```python\n")[1:]
    assert len(blocks) > 1
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block.split("```")[0], page, "exec"), names)
