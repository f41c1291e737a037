"""The installation and releases pages agree with pyproject.toml, and every example option is described."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
INSTALL = (ROOT / "docs/install.md").read_text(encoding="utf-8")


def extras() -> dict[str, list[str]]:
    """{extra: requirements} from pyproject.toml; Python 3.10 has no TOML reader."""
    section = PROJECT.partition("[project.optional-dependencies]\n")[2].partition("\n[project.")[0]
    lists = re.findall(r"^([a-z0-9-]+) = (\[.*?\])(?: *#.*)?$", section, re.MULTILINE | re.DOTALL)
    return {name: ast.literal_eval(text) for name, text in lists}


def bounds(name: str) -> tuple[str, str]:
    """Lower bound, and upper bound or "", for a requirement in the extras."""
    needs = {
        str(need.specifier)
        for texts in extras().values()
        for need in map(Requirement, texts)
        if need.name == name and need.specifier
    }
    (specifier,) = needs
    limits = dict(re.findall(r"(>=|<)([\d.]+)", specifier))
    return limits[">="], limits.get("<", "")


def rows(text: str) -> dict[str, list[str]]:
    """{first cell: other cells} from all tables on a page."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {first: rest for first, *rest in cells}


def test_the_page_lists_every_extra():
    listed = set()
    for first in rows(INSTALL.partition("## Other installers")[0]):
        listed |= set(re.findall(r"`([a-z0-9-]+)`", first))
    assert len(extras()) > 12
    assert listed == set(extras())


@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("torch", "torch"),
        ("Triton", "triton"),
        ("JAX", "jax"),
        ("Flax", "flax"),
        ("nvidia-cudnn-frontend", "nvidia-cudnn-frontend"),
    ],
)
def test_the_supported_versions_are_the_bounds_of_the_extras(library: str, name: str):
    least, below = bounds(name)
    supported = rows(INSTALL.partition("## Supported versions")[2])[library][0]
    assert supported.startswith(f"{least} and newer" + (f", below {below}" if below else ""))


def test_the_row_of_the_latest_release_has_the_bounds_of_the_extras():
    page = (ROOT / "docs/releases.md").read_text(encoding="utf-8")
    _, torch, triton, jax, python = next(
        cells for first, cells in rows(page).items() if re.match(r"\d.*\(", first)
    )
    assert (torch, triton) == (
        f"{bounds('torch')[0]} and newer",
        f"{bounds('triton')[0]} and newer",
    )
    assert jax.startswith(f"{bounds('jax')[0]} to ")
    assert [
        f">={least},<3.{int(most) + 1}"
        for least, most in re.findall(r"([\d.]+) to 3\.(\d+)", python)
    ] == re.findall(r'requires-python = "(.+)"', PROJECT)


def test_every_option_of_an_example_is_described():
    described = 0
    for path in sorted((ROOT / "examples").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                described += 1
                assert "help" in {keyword.arg for keyword in node.keywords}, (
                    f"{path.name}:{node.lineno}"
                )
    assert described > 30


def test_the_license_is_an_expression_with_its_file():
    assert 'license = "Apache-2.0"\nlicense-files = ["LICENSE"]\n' in PROJECT
    assert "License ::" not in PROJECT  # a classifier in addition to the expression is an error
