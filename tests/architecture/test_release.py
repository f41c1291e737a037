"""The version, the changelog, the citation and the page of releases agree."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.architecture.source import ROOT
from transformer_engine import __version__

OWN = __version__.partition("+py")[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def test_the_changelog_begins_with_unreleased_changes_and_the_present_release():
    headings = re.findall(r"^## (.+)$", CHANGELOG, re.M)
    assert headings[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(__version__)} \(\d{{4}}-\d\d-\d\d\)", headings[1])
    assert f"(`py{OWN}`)" in CHANGELOG.partition("## ")[0]


def test_the_release_has_its_date_and_versions_in_the_table_and_the_citation():
    (date,) = re.findall(rf"^## {re.escape(__version__)} \((.+)\)$", CHANGELOG, re.M)
    table = (ROOT / "docs/releases.md").read_text()
    api = __version__.partition("+")[0]
    assert f"| {OWN} ({date}) | {api} |" in table
    assert f"date-released: {date}" in (ROOT / "CITATION.cff").read_text()


def test_pages_name_the_present_version():
    for page in ("install.md", "from_the_original.md", "releases.md"):
        named = set(re.findall(r"\d+\.\d+\.\d+\+py\d+\.\d+\.\d+", (ROOT / "docs" / page).read_text()))
        assert named == {__version__}, page


@pytest.fixture
def cut() -> ModuleType:
    """The script that cuts a release."""
    spec = importlib.util.spec_from_file_location("release", ROOT / "docs/release.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(cut: ModuleType, tmp_path: Path) -> Path:
    """A copy of the files that a release changes, with an unreleased change."""
    for path in (cut.VERSION, Path("CHANGELOG.md"), Path("CITATION.cff"), *cut.PAGES):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text((ROOT / path).read_text(encoding="utf-8"), encoding="utf-8")
    changelog = tmp_path / "CHANGELOG.md"
    introduction, _, rest = changelog.read_text(encoding="utf-8").partition("## Unreleased\n")
    released = rest[rest.index(f"## {__version__}") :]
    unreleased = "\n### Added\n\n- A change.\n\n"
    changelog.write_text(f"{introduction}## Unreleased\n{unreleased}{released}", encoding="utf-8")
    return tmp_path


def test_a_release_is_written_wherever_the_version_is_stated(cut: ModuleType, checkout: Path):
    api = __version__.partition("+")[0]
    cut.release(checkout, "99.1.2", "2030-01-31")
    texts = {path: path.read_text(encoding="utf-8") for path in checkout.rglob("*") if path.is_file()}
    changelog = texts.pop(checkout / "CHANGELOG.md")
    headings = re.findall(r"^## (.+)$", changelog, re.M)
    assert headings[:2] == ["Unreleased", f"{api}+py99.1.2 (2030-01-31)"]
    assert (
        f"## {api}+py99.1.2 (2030-01-31)\n\n### Added\n\n- A change.\n" in changelog
        and "(`py99.1.2`)" in changelog
    )
    assert not [path for path, text in texts.items() if f"py{OWN}" in text or "99.1.2" not in text]
    assert "date-released: 2030-01-31" in texts[checkout / "CITATION.cff"]
    table = texts[checkout / "docs/releases.md"]
    assert f"| 99.1.2 (2030-01-31) | {api} |" in table and f"\n| {OWN} (" in table
    assert "-a py99.1.2 " in table and "a wheel | 99.1.2 |" in table


@pytest.mark.parametrize("version", [OWN, "0.0.1", "1.2", "next"])
def test_a_release_that_is_not_newer_changes_no_file(cut: ModuleType, checkout: Path, version: str):
    before = {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=f"{re.escape(version)} is not newer than {re.escape(OWN)}"):
        cut.release(checkout, version, "2030-01-31")
    assert before == {path: path.read_bytes() for path in before}


def test_a_release_without_changes_is_an_error(cut: ModuleType, checkout: Path):
    changelog = checkout / "CHANGELOG.md"
    changelog.write_text(
        changelog.read_text(encoding="utf-8").replace("- A change.\n", "", 1), encoding="utf-8"
    )
    with pytest.raises(ValueError, match="no change under Unreleased"):
        cut.release(checkout, "99.1.2", "2030-01-31")
