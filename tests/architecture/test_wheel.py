"""The wheel: every package in it is marked as typed, and its version is one that clients can compare."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
from packaging.version import Version

from tests.architecture.source import ROOT
from transformer_engine import __version__

# Paths of hosts such as GitHub and Gitea.
PATHS = ("/issues", "/blob/main/CHANGELOG.md", "/tree/main/docs")


def packages() -> list[Path]:
    return sorted(path.parent for path in ROOT.glob("transformer_engine*/__init__.py"))


def test_every_package_is_marked_as_typed_and_git_keeps_the_mark():
    assert {path.name for path in packages()} == {
        "transformer_engine",
        "transformer_engine_jax",
        "transformer_engine_tools",
        "transformer_engine_torch",
    }
    marks = [str(path / "py.typed") for path in packages()]
    assert all(Path(mark).is_file() for mark in marks)
    saved = subprocess.run(
        ["git", "ls-files", *marks], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert len(saved.stdout.split()) == len(marks)


def build(tmp_path: Path, kind: str, repository: str) -> Path:
    """Build a wheel or a source distribution without an index, as its publisher or as a user of the checkout."""
    program = (
        "import sys\nfrom setuptools import build_meta\n"
        f"getattr(build_meta, 'build_{kind}')({str(tmp_path)!r})\n"
    )
    environment = os.environ | {"REPOSITORY_URL": repository}
    subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, check=True, capture_output=True
    )
    (path,) = (path for path in tmp_path.iterdir() if path.suffix in (".whl", ".gz"))
    return path


def read_metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return message_from_bytes(wheel.read(name))


@pytest.mark.parametrize("repository", ["", "https://example.org/team/engine/"])
def test_the_wheel_has_all_modules_the_marks_and_the_urls_of_its_publisher(
    repository: str, tmp_path: Path
):
    path = build(tmp_path, "wheel", repository)
    assert path.name == f"transformer_engine-{__version__}-py3-none-any.whl"
    wheel = zipfile.ZipFile(path)
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    tracked = ["git", "ls-files", *(package.name for package in packages())]
    saved = subprocess.run(tracked, cwd=ROOT, capture_output=True, text=True, check=True)
    assert {name for name in files if "__pycache__" not in name} == set(saved.stdout.split())
    urls = read_metadata(wheel).get_all("Project-URL", [])
    assert [url.partition(", ")[2] for url in urls] == (
        [f"https://example.org/team/engine{path}" for path in ("", *PATHS)] if repository else []
    )


def test_published_descriptions_have_absolute_links_to_files_that_exist(tmp_path: Path):
    text = str(
        read_metadata(
            zipfile.ZipFile(build(tmp_path, "wheel", "https://example.org/team/engine"))
        ).get_payload()
    )
    targets = re.findall(r"\]\(([^)]+)\)|(?:src|srcset)=\"([^\"]+)\"", text)
    links = [first or second for first, second in targets]
    assert len(links) > 20
    assert [link.partition("#")[2] for link in links if ".png" in link] == ["gh-light-mode-only"]
    for link in links:
        assert link.startswith(("https://", "http://", "#")), link
        local = re.fullmatch(
            r"https://example\.org/team/engine/(blob|raw)/main/([^#]+)(#.*)?", link
        )
        if local is not None:
            assert (ROOT / local[2]).exists(), link
            assert (local[1] == "raw") == local[2].endswith((".png", ".svg")), link


def test_an_editable_installation_adds_the_checkout_to_the_path(tmp_path: Path):
    """mypy and pyright read paths in `.pth` files; they do not run import hooks."""
    with zipfile.ZipFile(build(tmp_path, "editable", "")) as wheel:
        (paths,) = [name for name in wheel.namelist() if name.endswith(".pth")]
        assert [Path(line) for line in wheel.read(paths).decode().splitlines()] == [ROOT]
        assert not [name for name in wheel.namelist() if name.endswith(".py")]


def test_the_source_distribution_has_what_a_packager_needs(tmp_path: Path):
    path = build(tmp_path, "sdist", "")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for needed in (
        "LICENSE",
        "SECURITY.md",
        "CITATION.cff",
        "setup.py",
        "tests/conftest.py",
        "docs/index.md",
    ):
        assert needed in names
    assert not [name for name in names if "__pycache__" in name]


def test_the_version_comes_after_the_originals_release_and_before_its_next():
    version = Version(__version__)
    assert version.local is not None and version.local.startswith("py")
    assert (
        Version(version.public)
        < version
        < Version(f"{version.major}.{version.minor}.{version.micro + 1}")
    )
    assert version >= Version("2.19.0")  # the highest that a known client asks for
