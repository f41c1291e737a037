"""The wheel: every package in it is marked as typed, and its version is one that clients can compare."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.version import Version

from tests.architecture.source import ROOT
from transformer_engine import __version__

PATHS = (
    "/issues",
    "/blob/main/CHANGELOG.md",
    "/tree/main/docs",
)  # as hosts such as GitHub and Gitea name them


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


@pytest.mark.parametrize("repository", ["", "https://example.org/team/engine/"])
def test_the_wheel_holds_the_marks_and_the_urls_of_its_publisher(repository: str, tmp_path: Path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    environment = os.environ | {"REPOSITORY_URL": repository}
    subprocess.run(build, cwd=ROOT, env=environment, check=True, capture_output=True)
    (path,) = tmp_path.glob("*.whl")
    assert path.name == f"transformer_engine-{__version__}-py3-none-any.whl"
    wheel = zipfile.ZipFile(path)
    assert {f"{package.name}/py.typed" for package in packages()} <= set(wheel.namelist())
    (metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    urls = message_from_bytes(wheel.read(metadata)).get_all("Project-URL", [])
    assert [url.partition(", ")[2] for url in urls] == (
        [f"https://example.org/team/engine{path}" for path in ("", *PATHS)] if repository else []
    )


def test_the_version_comes_after_the_originals_release_and_before_its_next():
    version = Version(__version__)
    assert version.local is not None and version.local.startswith("py")
    assert Version(version.public) < version < Version(f"{version.major}.{version.minor}.{version.micro + 1}")
    assert version >= Version("2.19.0")  # the highest that a known client asks for
