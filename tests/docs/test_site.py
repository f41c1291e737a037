"""The built site: pages name the repository, put wide tables in scroll containers, and never overflow."""

from __future__ import annotations

import base64
import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from transformer_engine import __version__

pytest.importorskip("material", reason="the site needs the extra docs")

ROOT = Path(__file__).resolve().parents[2]
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
WIDEST = ("", "support", "performance")  # the landing page's grid, and the widest tables
PAGES = (*WIDEST, "quickstart", "install", "cli", "environment", "attention", "jax", "numerics")
REFERENCE = ("api/modules", "api/extension", "api/recipes")
WIDTHS = (1280, 390)
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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the site of `make docs` if it is newer than the pages; otherwise build one without the API reference."""
    built, sources = ROOT / "site", [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.css")]
    index = built / "index.html"
    if index.exists() and index.stat().st_mtime > max(path.stat().st_mtime for path in sources):
        return built
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    config = load_config(
        str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=False, plugins=["search"], nav=None,
        exclude_docs="*.json\n*.py\napi/\n", repo_url=REPOSITORY,
    )  # fmt: skip
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
    own = (site / "stylesheets/extra.css").read_text()
    assert re.search(r"\.md-typeset__scrollwrap,[^}]*overflow-x: auto", own)
    for page in PAGES:
        for table in re.findall(r"<table[^>]*>", html(site, page)):
            assert table == "<table>" or "highlighttable" in table, f"{page}: {table} is not wrapped"


class Browser:
    """Headless Chromium, driven over pipes by the DevTools protocol."""

    def __init__(self, program: str, profile: Path):
        (self._read, theirs_out), (theirs_in, self._write) = os.pipe(), os.pipe()
        script = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        options = [
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
            f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            ["bash", "-c", script, program, *options],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._count, self._rest, self._session = 0, b"", ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            received = os.read(self._read, 1 << 20)
            if not received:
                raise RuntimeError("the browser ended")
            self._rest += received
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

    def call(self, method: str, until: str = "", **arguments: Any) -> dict[str, Any]:
        """Return the result of a command; with `until`, wait for that event too."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": arguments}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        result: dict[str, Any] | None = None
        while result is None or until:
            received = self._message()
            if received.get("id") == self._count:
                assert "error" not in received, received
                result = received["result"]
            elif received.get("method") == until:
                until = ""
        return result

    def overflowing(self, address: str, width: int, scheme: str) -> list[str]:
        """Open a page and return the elements that are wider than the window."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call("Page.navigate", until="Page.loadEventFired", url=address)
        result = self.call("Runtime.evaluate", expression=OVERFLOWING)
        return json.loads(result["result"]["value"])

    def screenshot(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)
        os.close(self._read)
        os.close(self._write)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no headless browser is installed: {', '.join(BROWSERS)}")
    opened = Browser(program, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: Any) -> None:
            """Print nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("pages", [WIDEST, pytest.param(PAGES[3:] + REFERENCE, marks=pytest.mark.slow)])
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
        found = browser.overflowing(f"{address}/{page}", width, scheme)
        if found:
            wide[page] = found
        shots.append(browser.screenshot())
        (tmp_path / f"{page.replace('/', '_') or 'index'}.png").write_bytes(shots[-1])
    assert wide == {}
    assert all(shot.startswith(b"\x89PNG") for shot in shots) and len(set(shots)) == len(pages)


def test_an_element_that_is_too_wide_is_found(browser: Browser, tmp_path: Path):
    page = tmp_path / "wide.html"
    wide, scrolled = ('<div style="width: 700px">wide</div>', '<div style="width: 300px; overflow: auto">')
    meta = '<meta name="viewport" content="width=device-width">'
    page.write_text(
        f"{meta}<main class='md-content'>{wide}{scrolled}{wide.replace('wide', 'fits')}</div></main>"
    )
    assert browser.overflowing(page.as_uri(), 390, "light") == ["DIV.: wide", "page: 708 px"]
    assert browser.overflowing(page.as_uri(), 1280, "light") == []
