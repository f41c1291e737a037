"""Page sections that scripts write: the text between `<!-- name -->` and `<!-- end of name -->`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def update_page(page: str, sections: Mapping[str, str]) -> str:
    """Insert each {name: text} between its markers and return the page."""
    for name, text in sections.items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = page.split(start)
        page = before + start + text + end + rest.split(end)[1]
    return page


def write(script: str, pages: Mapping[Path, Mapping[str, str]]) -> int:
    """Write the sections of each {page: sections}; with --check only report stale pages. Returns the exit status."""
    fresh = {path: update_page(path.read_text(), sections) for path, sections in pages.items()}
    stale = [path for path, text in fresh.items() if text != path.read_text()]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date; run python docs/{Path(script).name}")
        return int(bool(stale))
    for path in stale:
        path.write_text(fresh[path])
    return 0
