"""The built site: pages name the repository, tables and signatures wrap, and no element overflows."""

from __future__ import annotations

import functools
import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import PROGRAMS, Browser, find_browser
from transformer_engine import __version__

pytest.importorskip("material", reason="the site needs the extra docs")

ROOT = Path(__file__).resolve().parents[2]
WIDEST = ("", "support", "performance")  # the landing page's grid, and the widest tables
PAGES = (*WIDEST, "quickstart", "install", "cli", "environment", "attention", "jax", "numerics")
REFERENCE = ("api/modules", "api/extension", "api/recipes")
TABLES = (
    "support",
    "performance",
    "attention",
    "troubleshooting",
    "plan_accuracy",
    "verify",
    "clients",
    "your_gpu",
)
WIDTHS = (1920, 1280, 390)
PHONE_COLUMNS = 3  # tables with more columns scroll in their own box on a phone
TALLEST = 60_000  # pixels of a page at 1280
REPOSITORY = "https://git.example/te"

# Elements whose right edge is outside of the window, unless a parent scrolls or clips them.
OVERFLOWING = """
(() => {
  const wide = [], limit = document.documentElement.clientWidth + 1;
  const contained = element => {
    for (let parent = element.parentElement; parent && parent !== document.body; parent = parent.parentElement) {
      const clips = getComputedStyle(parent).overflowX !== "visible";
      if (clips && parent.getBoundingClientRect().right <= limit) return true;
    }
    return false;
  };
  for (const element of document.querySelectorAll(".md-content *, .md-header *")) {
    const box = element.getBoundingClientRect();
    if (box.width && box.height && box.right > limit && !contained(element)) {
      wide.push(`${element.tagName}.${element.className}: ${element.textContent.trim().slice(0, 40)}`);
    }
  }
  const page = document.documentElement;
  if (page.scrollWidth > limit) wide.push(`page: ${page.scrollWidth} px`);
  return JSON.stringify(wide.slice(0, 5));
})()
"""


# Signatures and programs that do not fit into their box, tables that scroll, and the height of the page.
GEOMETRY = """
(async () => {
  await new Promise(done => requestAnimationFrame(() => setTimeout(done, 100)));  // the theme's script wraps tables
  const clipped = selector => [...document.querySelectorAll(selector)]
    .filter(element => element.clientWidth && element.scrollWidth > element.clientWidth + 1);
  const text = element => `${element.scrollWidth - element.clientWidth} px: ${element.textContent.trim().slice(0, 60)}`;
  const columns = element => element.querySelectorAll("tr:first-child > *").length
    / Math.max(1, element.querySelectorAll("tr:first-child").length);
  return {
    signatures: clipped(".doc-signature, .doc-signature pre, .doc-signature code").map(text),
    programs: clipped(".md-content pre > code").map(text),
    tables: clipped(".md-content .md-typeset__scrollwrap").map(element => [columns(element), text(element)]),
    height: document.documentElement.scrollHeight,
  };
})()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the site of `make docs` if it is newer than the pages; otherwise build one without the API reference."""
    built, sources = (
        ROOT / "site",
        [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.css")],
    )
    index = built / "index.html"
    if index.exists() and index.stat().st_mtime > max(path.stat().st_mtime for path in sources):
        return built
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    config = load_config(
        str(ROOT / "mkdocs.yml"),
        site_dir=str(folder),
        strict=False,
        plugins=["search"],
        nav=None,
        exclude_docs="*.json\n*.py\n__pycache__/\napi/\n",
        repo_url=REPOSITORY,
    )
    build(config)
    return folder


def html(site: Path, page: str) -> str:
    return (site / page / "index.html").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_page_adapts_to_the_screen(site: Path, page: str):
    text = html(site, page)
    assert '<meta name="viewport" content="width=device-width,initial-scale=1">' in text
    schemes = re.findall(r'data-md-color-scheme="(\w+)"', text)
    assert {"default", "slate"} <= set(schemes) and 'class="md-header__option"' in text


def test_programs_that_need_a_client_are_highlighted(site: Path):
    assert '<span class="kn">import</span>' in html(site, "peft")


def test_repository_and_version_are_shown(site: Path):
    text = html(site, "")
    assert f"Transformer Engine in Python {__version__}" in text
    if site != ROOT / "site":  # publishers set the repository of `make docs` in REPOSITORY_URL
        assert f'<a href="{REPOSITORY}" title="Go to repository"' in text


def test_wide_elements_scroll_in_their_own_box(site: Path):
    """Material's script wraps every table without a class; the stylesheets give the wrapper and code a scroll bar."""
    theme = "".join(path.read_text() for path in (site / "assets/stylesheets").glob("main.*.css"))
    assert re.search(r"\.md-typeset__scrollwrap\{[^}]*overflow-x:auto", theme)
    assert re.search(r"\.md-typeset pre>code\{[^}]*overflow:auto", theme)
    assert re.search(r"img[^{}]*\{[^}]*max-width:100%", theme)
    local = (site / "stylesheets/extra.css").read_text()
    assert re.search(r"\.md-typeset__scrollwrap,[^}]*overflow-x: auto", local)
    for page in PAGES:
        for table in re.findall(r"<table[^>]*>", html(site, page)):
            assert table == "<table>" or "highlighttable" in table, (
                f"{page}: {table} is not wrapped"
            )


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip(f"no headless browser is installed: {', '.join(PROGRAMS)}")
    opened = Browser(program, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: Any) -> None:
            """Print nothing."""

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def overflowing(browser: Browser, address: str, width: int, scheme: str) -> list[str]:
    """Open a page and return the elements that are wider than the window."""
    browser.open(address, width, scheme)
    return json.loads(browser.evaluate(OVERFLOWING))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "pages", [WIDEST, pytest.param(PAGES[3:] + REFERENCE, marks=pytest.mark.slow)]
)
def test_no_element_overflows(
    browser: Browser,
    site: Path,
    address: str,
    pages: tuple[str, ...],
    width: int,
    scheme: str,
    tmp_path: Path,
):
    pages = tuple(page for page in pages if (site / page).exists())
    wide, shots = {}, []
    for page in pages:
        result = overflowing(browser, f"{address}/{page}", width, scheme)
        if result:
            wide[page] = result
        shots.append(browser.screenshot())
        (tmp_path / f"{page.replace('/', '_') or 'index'}.png").write_bytes(shots[-1])
    assert wide == {}
    assert all(shot.startswith(b"\x89PNG") for shot in shots) and len(set(shots)) == len(pages)


@pytest.mark.parametrize("width", WIDTHS)
def test_signatures_tables_and_programs_fit_into_the_page(
    browser: Browser, site: Path, address: str, width: int
):
    """Every page of a complete site; without the API reference, the pages with the widest tables."""
    complete = (site / "api").is_dir()
    pages = (
        sorted(str(path.parent.relative_to(site)) for path in site.rglob("index.html"))
        if complete
        else list(TABLES)
    )
    wide: dict[str, Any] = {}
    for page in pages:
        browser.open(f"{address}/{page}", width)
        result = browser.evaluate(GEOMETRY)
        limit = PHONE_COLUMNS if width < 600 else 100
        tables = [text for columns, text in result["tables"] if columns <= limit]
        # on a phone, they scroll in their box
        programs = result["programs"] if width >= 1280 else []
        if (
            result["signatures"]
            or programs
            or tables
            or (width == 1280 and result["height"] > TALLEST)
        ):
            wide[page] = result["signatures"], programs, tables, result["height"]
    assert wide == {}


def test_a_table_a_signature_and_a_program_that_are_too_wide_are_found(
    browser: Browser, tmp_path: Path
):
    page = tmp_path / "clipped.html"
    page.write_text(
        "<main class='md-content'><div class='doc-signature' style='width: 90px; overflow: auto'>"
        f"<code>{'x' * 60}</code></div><div class='md-typeset__scrollwrap' style='width: 90px; overflow: auto'>"
        f"<table><tr><td>{'x' * 60}</td><td>b</td></tr></table></div>"
        f"<pre><code style='display: block; width: 90px; overflow: auto'>{'x' * 60}</code></pre></main>"
    )
    browser.open(page.as_uri(), 1280)
    result = browser.evaluate(GEOMETRY)
    assert len(result["signatures"]) == len(result["programs"]) == 1
    assert [columns for columns, _ in result["tables"]] == [2]


def test_the_dark_scheme_has_dark_pictures(browser: Browser, site: Path, address: str):
    """The home page has two variants of its plot. Other plots are inverted, so that their background is dark."""
    listing = """[...document.querySelectorAll(".md-content img")]
        .map(image => [image.src.split("/").pop().split("#")[0], getComputedStyle(image)])
        .filter(([, style]) => style.display !== "none").map(([name, style]) => [name, style.filter])"""
    for scheme, picture, inverted in (
        ("light", "models-h200.png", "none"),
        ("dark", "models-h200-dark.png", "invert(1) hue-rotate(180deg)"),
    ):
        browser.open(f"{address}/", 1280, scheme)
        assert browser.evaluate(listing) == [[picture, "none"]]
        browser.open(f"{address}/cli/", 1280, scheme)
        assert {filter for _, filter in browser.evaluate(listing)} == {inverted}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs/images").glob("*.png")), ids=lambda path: path.stem
)
def test_a_picture_is_drawn_in_the_width_of_the_text(path: Path):
    """A picture of at most eight inches is not scaled below the size of its labels (8.5 points or more)."""
    data = path.read_bytes()
    width = int.from_bytes(data[16:20], "big")
    start = data.index(b"pHYs") + 4
    inches = width / (int.from_bytes(data[start : start + 4], "big") * 0.0254)
    assert inches < 8.1


def test_the_site_has_no_sources(site: Path):
    assert not [
        path
        for path in site.rglob("*")
        if path.suffix in (".py", ".pyc") or path.name == "__pycache__"
    ]


def test_an_element_that_is_too_wide_is_found(browser: Browser, tmp_path: Path):
    page = tmp_path / "wide.html"
    wide, scrolled = (
        '<div style="width: 700px">wide</div>',
        '<div style="width: 300px; overflow: auto">',
    )
    meta = '<meta name="viewport" content="width=device-width">'
    page.write_text(
        f"{meta}<main class='md-content'>{wide}{scrolled}{wide.replace('wide', 'fits')}</div></main>"
    )
    assert overflowing(browser, page.as_uri(), 390, "light") == ["DIV.: wide", "page: 708 px"]
    assert overflowing(browser, page.as_uri(), 1280, "light") == []
