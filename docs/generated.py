"""Sections of pages that scripts write: the text between `<!-- name -->` and `<!-- end of name -->`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def updated(page: str, sections: Mapping[str, str]) -> str:
    """The page with the text of each {name: text} put between its markers."""
    for name, text in sections.items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = page.split(start)
        page = before + start + text + end + rest.split(end)[1]
    return page


def write(script: str, pages: Mapping[Path, Mapping[str, str]]) -> int:
    """Write the sections of each {page: sections}; with --check only say which pages are stale. The exit status."""
    fresh = {path: updated(path.read_text(), sections) for path, sections in pages.items()}
    stale = [path for path, text in fresh.items() if text != path.read_text()]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(
                f"{path.relative_to(ROOT)} is older than what it shows; run python docs/{Path(script).name}"
            )
        return int(bool(stale))
    for path in stale:
        path.write_text(fresh[path])
    return 0
