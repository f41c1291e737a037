"""The form of documentation pages: each begins with a sentence that states what the page is for."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.support.pages import DOCS

PAGES = [
    path for path in sorted((*DOCS.glob("*.md"), *DOCS.glob("api/*.md"))) if path.name != "index.md"
]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_a_page_begins_with_its_title_and_a_sentence(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    if lines[0] == "---":  # settings of the site
        lines = lines[lines.index("---", 1) + 2 :]
    title, _, first, *_ = [line for line in lines if not line.startswith("<!--")]
    assert title.startswith("# ")
    assert re.match(r"[A-Z`\[]", first) and not first.startswith("```"), first


def test_the_page_of_names_links_to_every_entry_of_the_reference():
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    assert spec is not None and spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = hooks.on_page_markdown((DOCS / "api/names.md").read_text(encoding="utf-8"))
    links = re.findall(r"\[`(\w+)`\]\((\w+\.md)#([\w.]+)\)", page)
    entries = {
        name: path.name
        for path in DOCS.glob("api/*.md")
        for name in re.findall(r"^::: (\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert {name for _, _, name in links} == set(entries) and len(links) == len(entries) > 700
    for text, target, name in links:
        assert name.endswith(f".{text}")
        assert re.search(
            rf"^::: {re.escape(name)}$", (DOCS / "api" / target).read_text("utf-8"), re.MULTILINE
        )
