"""The version, the changelog, the citation and the page of releases agree."""

from __future__ import annotations

import re

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
