"""Files for other installers and for reports agree with pyproject.toml and the program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

PROJECT = (ROOT / "pyproject.toml").read_text()
EXTRAS = set(
    re.findall(r"^([\w-]+) = \[", PROJECT.split("[project.optional-dependencies]")[1], re.M)
)
INSTRUCTIONS = {"ARG", "FROM", "ENV", "WORKDIR", "COPY", "RUN", "CMD"}


def is_supported(version: str) -> bool:
    """Whether pyproject.toml accepts a Python minor release, such as 3.12."""
    lowest, end = re.findall(r"3\.\d+", re.search(r'requires-python = "(.*)"', PROJECT)[1])  # type: ignore[index]
    return int(lowest[2:]) <= int(version[2:]) < int(end[2:])


def extract_extras(text: str) -> set[str]:
    """Extras of this package in lines such as `pip install ".[cli,cuda]"`."""
    return {
        name for extras in re.findall(r"\"\.\[([\w,-]+)\]\"", text) for name in extras.split(",")
    }


def test_the_container_recipe_has_both_images_and_known_instructions():
    lines = [
        line for line in (ROOT / "Dockerfile").read_text().splitlines() if line and line[0] != "#"
    ]
    assert {line.split()[0] for line in lines} == INSTRUCTIONS
    stages = {line.split()[-1]: line.split()[1] for line in lines if line.startswith("FROM")}
    assert stages == {"base": "python:${PYTHON}-slim", "cpu": "base", "cuda": "base"}
    (version,) = [line.split("=")[1] for line in lines if line.startswith("ARG PYTHON=")]
    assert is_supported(version)
    arguments = [line.split()[1].split("=")[0] for line in lines if line.startswith("ARG")]
    used = re.findall(r"\$\{(\w+)\}", "\n".join(lines))
    assert set(used) == set(arguments)
    assert (ROOT / "constraints.txt").is_file()


def test_the_conda_environment_has_a_supported_python():
    text = (ROOT / "environment.yml").read_text()
    (version,) = re.findall(r"- python=(.*)", text)
    assert is_supported(version)
    assert text.index("- pip\n") < text.index("- pip:")


@pytest.mark.parametrize(
    "path", ["Dockerfile", "environment.yml", "README.md", "docs/install.md", "docs/cli.md"]
)
def test_every_extra_in_documented_commands_exists(path: str):
    result = extract_extras((ROOT / path).read_text())
    assert result and result <= EXTRAS


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda f: f.stem
)
def test_issue_forms_request_the_installation_report(form: Path):
    text = form.read_text()
    if form.stem in ("bug", "performance", "client", "question"):
        assert "`te doctor`" in text
    if form.stem != "config":
        assert text.startswith("name: ") and "\nbody:\n" in text


def test_the_readme_fits_on_a_page():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    first = "\n".join(lines[:40])
    assert "docs/images/" in first and "| --- |" in first and "git clone" in first
