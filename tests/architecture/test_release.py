"""Version, changelog, citation and releases page agree."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from packaging.version import Version

from tests.architecture.source import ROOT
from transformer_engine import __version__

CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
RELEASED = re.findall(r"^## (.+) \(\d{4}-\d\d-\d\d\)$", CHANGELOG, re.M)[
    0
]  # such as "2.20.2+py0.3.0"
API, _, OWN = RELEASED.partition("+py")


def test_the_package_version_is_the_release_or_the_development_after_it():
    assert Version(__version__).public == API
    if __version__ != RELEASED:
        development = Version(__version__.partition("+py")[2])
        assert development.dev == 0 and development > Version(OWN), (
            f"{__version__} does not follow {RELEASED}"
        )
        assert __version__ == f"{API}+py{development}"  # normalized, as in the names of wheels


def test_the_changelog_begins_with_unreleased_changes_and_the_present_release():
    headings = re.findall(r"^## (.+)$", CHANGELOG, re.M)
    assert headings[0] == "Unreleased"
    assert re.fullmatch(rf"{re.escape(RELEASED)} \(\d{{4}}-\d\d-\d\d\)", headings[1])
    assert f"(`py{OWN}`)" in CHANGELOG.partition("## ")[0]


def test_the_release_has_its_date_and_versions_in_the_table_and_the_citation():
    (date,) = re.findall(rf"^## {re.escape(RELEASED)} \((.+)\)$", CHANGELOG, re.M)
    table = (ROOT / "docs/releases.md").read_text()
    assert f"| {OWN} ({date}) | {API} |" in table
    assert f"version: {RELEASED}\ndate-released: {date}" in (ROOT / "CITATION.cff").read_text()


def test_pages_name_the_latest_release():
    for page in ("install.md", "from_the_original.md", "releases.md"):
        named = set(
            re.findall(r"\d+\.\d+\.\d+\+py\d+\.\d+\.\d+", (ROOT / "docs" / page).read_text())
        )
        assert named == {RELEASED}, page


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
    """A copy of the files that a release changes, with one unreleased change."""
    for path in (cut.VERSION, Path("CHANGELOG.md"), Path("CITATION.cff"), *cut.PAGES):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text((ROOT / path).read_text(encoding="utf-8"), encoding="utf-8")
    changelog = tmp_path / "CHANGELOG.md"
    introduction, _, rest = changelog.read_text(encoding="utf-8").partition("## Unreleased\n")
    released = rest[rest.index(f"## {RELEASED}") :]
    unreleased = "\n### Added\n\n- A change.\n\n"
    changelog.write_text(f"{introduction}## Unreleased\n{unreleased}{released}", encoding="utf-8")
    return tmp_path


def test_a_release_is_written_wherever_the_version_is_stated(cut: ModuleType, checkout: Path):
    cut.release(checkout, "99.1.2", "2030-01-31")
    texts = {
        path: path.read_text(encoding="utf-8") for path in checkout.rglob("*") if path.is_file()
    }
    changelog = texts.pop(checkout / "CHANGELOG.md")
    headings = re.findall(r"^## (.+)$", changelog, re.M)
    assert headings[:2] == ["Unreleased", f"{API}+py99.1.2 (2030-01-31)"]
    assert (
        f"## {API}+py99.1.2 (2030-01-31)\n\n### Added\n\n- A change.\n" in changelog
        and "(`py99.1.2`)" in changelog
    )
    assert not [path for path, text in texts.items() if f"py{OWN}" in text or "99.1.2" not in text]
    assert "date-released: 2030-01-31" in texts[checkout / "CITATION.cff"]
    table = texts[checkout / "docs/releases.md"]
    assert f"| 99.1.2 (2030-01-31) | {API} |" in table and f"\n| {OWN} (" in table
    assert "-a py99.1.2 " in table and "a wheel | 99.1.2 |" in table


@pytest.mark.parametrize("version", [OWN, "0.0.1", "1.2", "next"])
def test_a_release_that_is_not_newer_changes_no_file(cut: ModuleType, checkout: Path, version: str):
    before = {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()}
    with pytest.raises(
        ValueError, match=f"{re.escape(version)} is not newer than {re.escape(OWN)}"
    ):
        cut.release(checkout, version, "2030-01-31")
    assert before == {path: path.read_bytes() for path in before}


def test_starting_the_next_version_changes_only_the_package_and_is_releasable(
    cut: ModuleType, checkout: Path
):
    before = {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()}
    cut.develop(checkout, "99.0.0")
    assert f'"{API}+py99.0.0.dev0"' in (checkout / cut.VERSION).read_text(encoding="utf-8")
    changed = [path for path in before if path.read_bytes() != before[path]]
    assert changed == [checkout / cut.VERSION]
    with pytest.raises(ValueError, match=f"is not newer than {re.escape(OWN)}"):
        cut.develop(checkout, OWN)
    cut.release(checkout, "99.0.0", "2030-01-31")
    assert f'"{API}+py99.0.0"' in (checkout / cut.VERSION).read_text(encoding="utf-8")


def test_a_release_without_changes_is_an_error(cut: ModuleType, checkout: Path):
    changelog = checkout / "CHANGELOG.md"
    changelog.write_text(
        changelog.read_text(encoding="utf-8").replace("- A change.\n", "", 1), encoding="utf-8"
    )
    with pytest.raises(ValueError, match="no change under Unreleased"):
        cut.release(checkout, "99.1.2", "2030-01-31")
