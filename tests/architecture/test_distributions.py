"""Distributions for a package index: import packages under their own name, and a metadata shim."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.architecture.source import PACKAGES, ROOT
from transformer_engine import __version__

BUILD = ROOT / "distributions" / "build.py"
OWN = "transformer-engine-python"
BUILD_WHEEL = (
    "import sys; sys.path.insert(0, '.'); import backend; print(backend.build_wheel(sys.argv[1]))"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The packages' wheel and the shim's unpacked source."""
    out = tmp_path_factory.mktemp("distributions")
    environment = os.environ | {"REPOSITORY_URL": ""}
    subprocess.run(
        [sys.executable, str(BUILD), "--out", str(out)],
        env=environment,
        check=True,
        capture_output=True,
    )
    (wheel,), (source,) = out.glob("*.whl"), out.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(out, filter="data")
    return wheel, out / source.name.removesuffix(".tar.gz")


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Python from a fresh environment without pip."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True
    )
    return tmp_path / "venv" / "bin" / "python"


def build_shim(python: Path, source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-c", BUILD_WHEEL, str(out)]
    return subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)


def install_metadata(python: Path, name: str, version: str) -> None:
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    folder = packages / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_wheel_has_the_packages_under_its_own_name(built: tuple[Path, Path]):
    wheel = zipfile.ZipFile(built[0])
    folders = {name.partition("/")[0] for name in wheel.namelist()}
    release = __version__.partition("+py")[2]
    info = f"transformer_engine_python-{release}.dist-info"
    assert folders == {*PACKAGES, info}
    text = wheel.read(f"{info}/METADATA").decode()
    assert f"Name: {OWN}\nVersion: {release}\n" in text
    assert f"Requires-Dist: {OWN}[" in text and "Requires-Dist: transformer-engine[" not in text
    assert "te = transformer_engine_tools:main" in wheel.read(f"{info}/entry_points.txt").decode()


def test_shim_has_the_version_that_clients_read_and_requires_the_packages(
    built: tuple[Path, Path], python: Path, tmp_path: Path
):
    done = build_shim(python, built[1], tmp_path)
    assert done.returncode == 0, done.stderr
    shim = zipfile.ZipFile(tmp_path / done.stdout.strip())
    assert {name.partition("/")[0] for name in shim.namelist()} == {
        f"transformer_engine-{__version__}.dist-info"
    }
    shim.extractall(tmp_path / "installed")
    (installed,) = metadata.distributions(path=[str(tmp_path / "installed")])
    assert (installed.metadata["Name"], installed.version) == ("transformer-engine", __version__)
    needs = [Requirement(text) for text in installed.requires or ()]
    assert {need.name for need in needs} == {OWN}
    assert {f"=={__version__.partition('+py')[2]}"} == {str(need.specifier) for need in needs}
    extras = set(installed.metadata.get_all("Provides-Extra", []))
    assert {"pytorch", "jax", "cli", "core-cu12"} <= extras
    assert {extra for need in needs for extra in need.extras} == extras


@pytest.mark.parametrize(
    "name", ["transformer-engine", "transformer_engine_torch", "transformer-engine-cu13"]
)
def test_shim_does_not_hide_an_installed_original(
    name: str, built: tuple[Path, Path], python: Path, tmp_path: Path
):
    install_metadata(python, name, "2.20.2")
    done = build_shim(python, built[1], tmp_path)
    assert done.returncode != 0 and not list(tmp_path.glob("*.whl"))
    assert (
        f"{name.replace('_', '-')} 2.20.2 of the original Transformer Engine is installed"
        in done.stderr
    )
    assert "pip uninstall" in done.stderr


def test_shim_replaces_its_own_earlier_version(
    built: tuple[Path, Path], python: Path, tmp_path: Path
):
    install_metadata(python, "transformer-engine", "2.19.0+py0.1.0")
    assert build_shim(python, built[1], tmp_path).returncode == 0
