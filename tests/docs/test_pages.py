"""The form of documentation pages: each begins with a sentence that states what the page is for."""

from __future__ import annotations

import re

import pytest

from tests.support.pages import DOCS

PAGES = [path for path in sorted((*DOCS.glob("*.md"), *DOCS.glob("api/*.md"))) if path.name != "index.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_a_page_begins_with_its_title_and_a_sentence(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    title, _, first, *_ = [line for line in lines if not line.startswith("<!--")]
    assert title.startswith("# ")
    assert re.match(r"[A-Z`\[]", first) and not first.startswith("```"), first
