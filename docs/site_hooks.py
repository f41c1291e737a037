"""MkDocs hooks: a footer with the version, colors for all Python programs, wrapped names in cells, a list of names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

VERSION_FILE = Path(__file__).resolve().parent.parent / "transformer_engine" / "_version.py"
REFERENCE = Path(__file__).resolve().parent / "api"
ENTRY = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
NAMES = re.compile(r"<!-- names: .*? -->")
# python-clients: a program that needs a client
PROGRAM = re.compile(r"^```python-\w[\w-]*$", re.MULTILINE)
CELL = re.compile(r"<(t[dh])\b.*?</\1>", re.DOTALL)
TEXT = re.compile(r"(?<=>)[^<]+")
BREAK = re.compile(r"([._/,=(\[:]+|(?<=[a-z])(?=[A-Z][a-z]))(?=\w)")


def on_config(config: Any) -> Any:
    """Set the footer; the version is read without importing the package."""
    version = re.search(r'__version__ = "(.+)"', VERSION_FILE.read_text())
    assert version is not None, f"{VERSION_FILE} defines no __version__"
    config.copyright = f"{config.site_name} {version[1]}"
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Highlight programs that need a client or a GPU like all other programs, and insert the list of names."""
    return NAMES.sub(lambda _: _list_names(), PROGRAM.sub("```python", markdown))


def _list_names() -> str:
    """A section for each module of the reference, with links to its names."""
    pages = {
        name: path.name
        for path in sorted(REFERENCE.glob("*.md"), reverse=True)
        for name in ENTRY.findall(path.read_text(encoding="utf-8"))
    }
    modules: dict[str, list[str]] = {}
    for name in sorted(pages, key=str.lower):
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    sections = []
    for module, names in sorted(modules.items()):
        links = [f"[`{name.rpartition('.')[2]}`]({pages[name]}#{name})" for name in names]
        sections.append(f"## {module}\n\n{', '.join(links)}")
    return "\n\n".join(sections)


def on_page_content(html: str, **_: Any) -> str:
    """Allow line breaks inside long names in cells: after separators, and between words in a class name."""
    return CELL.sub(lambda cell: TEXT.sub(_with_breaks, cell[0]), html)


def _with_breaks(text: re.Match[str]) -> str:
    return re.sub(r"[^\s&;]{9,}", lambda word: BREAK.sub(r"\1<wbr>", word[0]), text[0])
