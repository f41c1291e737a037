"""The guides of the documentation: their cells run, their numbers are those of the program, their messages exist."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages import DOCS, run
from transformer_engine.pytorch.quantization import emulate

ROOT = DOCS.parent


@pytest.fixture(autouse=True)
def _emulation_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore emulation, which a page may enable permanently, and run in a temporary folder for pictures of pages."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    with emulate():
        yield


def output_blocks(page: str) -> list[str]:
    """The outputs that a page shows: blocks without a language."""
    blocks = re.findall(r"```(\w*)\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return [text for language, text in blocks if not language]


def test_first_principles_prints_the_output_on_the_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    """The losses of the last cells depend on the machine's rounding: their last digit may differ."""
    run("first_principles.md")
    printed = capsys.readouterr().out
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "number_line.png",
        "casts.png",
        "scales.png",
        "losses.png",
    }
    *exact, losses, observed = output_blocks("first_principles.md")
    for block in exact:
        assert block in printed
    for block in (losses, observed):
        for line in block.splitlines():
            assert line.split()[0] in printed
    listing = dict(re.findall(r"(\w+) +loss [\d.]+ -> ([\d.]+)", losses))
    measured = dict(re.findall(r"(\w+) +loss [\d.]+ -> ([\d.]+)", printed))
    assert listing.keys() == measured.keys()
    assert all(abs(float(measured[name]) - float(value)) < 0.02 for name, value in listing.items())


def test_notebook_has_the_cells_of_the_page():
    command = [sys.executable, DOCS / "notebook.py", "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "page", ["which_recipe.md", "from_the_original.md", "diverged.md", "troubleshooting.md"]
)
@pytest.mark.filterwarnings("ignore:Recipe type changed", "ignore:window_size")
def test_examples_of_a_guide_run(page: str):
    names = run(page)
    if page == "diverged.md":
        worst = max(names["report"].quantized, key=lambda tensor: tensor.underflow)
        assert worst.name == "1.weight" and worst.underflow > 0.99
    if page == "which_recipe.md":
        assert names["layer"].weight.shape == (128, 128) and names["worst"].sqnr > 20


def test_messages_of_the_troubleshooting_page_are_those_of_the_program():
    source = "".join(path.read_text() for path in ROOT.glob("transformer_engine*/**/*.py"))
    joined = re.sub(r'"\s*f?"', "", source)  # parts of one text on several lines
    rows = re.findall(r"^\| (`.*?`) \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(rows) >= 18
    for row in rows:
        for part in row.strip("`").split("…"):
            assert part.strip() in joined, part


def test_every_example_is_listed():
    listed = re.findall(r"^\| `(\w+\.py)`", (DOCS / "examples.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))
