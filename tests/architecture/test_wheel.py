"""The wheel: every package in it is marked as typed, and its version is one that clients can compare."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

from tests.architecture.source import ROOT
from transformer_engine import __version__


def packages() -> list[Path]:
    return sorted(path.parent for path in ROOT.glob("transformer_engine*/__init__.py"))


def test_every_package_is_marked_as_typed_and_git_keeps_the_mark():
    assert {path.name for path in packages()} == {
        "transformer_engine",
        "transformer_engine_jax",
        "transformer_engine_torch",
    }
    marks = [str(path / "py.typed") for path in packages()]
    assert all(Path(mark).is_file() for mark in marks)
    kept = subprocess.run(["git", "ls-files", *marks], cwd=ROOT, capture_output=True, text=True, check=True)
    assert len(kept.stdout.split()) == len(marks)


def test_the_build_names_every_package():
    project = (ROOT / "pyproject.toml").read_text()
    (line,) = [line for line in project.splitlines() if line.startswith("packages = ")]
    assert line == "packages = " + str([path.name for path in packages()]).replace("'", '"')
    assert "exclude =" not in project.partition("[tool.hatch")[2].partition("[tool.ruff]")[0]


@pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed")
def test_the_wheel_holds_the_marks(tmp_path: Path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"transformer_engine-{__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert all(f"{path.name}/py.typed" in names for path in packages())


def test_the_version_comes_after_the_originals_release_and_before_its_next():
    version = Version(__version__)
    assert version.local is not None and version.local.startswith("py")
    assert Version(version.public) < version < Version(f"{version.major}.{version.minor}.{version.micro + 1}")
    assert version >= Version("2.19.0")  # the highest that a known client asks for
