"""Write how each name of docs/names.csv stands into that file, and its summary into docs/support.md; --check compares.

python docs/names_table.py [--check]

The file lists the public names of release 2.20 of the original: name, kind, status and source. A name is "served" if it
exists here, "raises" if a call of it raises an error with the replacement, and "absent" otherwise. The reasons of
absent names are rows of transformer_engine/common/absent.py. The source is clients (published packages that import the
name), documentation, tests (code written against the original) or reference.
"""

from __future__ import annotations

import csv
import functools
import importlib
import io
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from generated import ROOT, write

NAMES = ROOT / "docs" / "names.csv"
PAGE = ROOT / "docs" / "support.md"
USED = ("documentation", "clients")


class Name(NamedTuple):
    """A public name of the original."""

    name: str
    kind: str
    status: str
    source: str

    @property
    def package(self) -> str:
        """The framework's package, or the root package."""
        parts = self.name.split(".")
        return ".".join(
            parts[
                : 2 if parts[:2] in (["transformer_engine", "pytorch"], ["transformer_engine", "jax"]) else 1
            ]
        )


def listed() -> list[Name]:
    """Return the rows of the file."""
    with NAMES.open(newline="") as file:
        return [Name(**row) for row in csv.DictReader(file)]


def resolved(name: str) -> Any:
    """Return the object of a dotted name, an attribute before a module; AttributeError if it does not exist."""
    place, _, last = name.rpartition(".")
    if not place:
        return importlib.import_module(name)
    try:
        holder = importlib.import_module(place)
    except ModuleNotFoundError:  # a class
        holder = resolved(place)
    try:
        return getattr(holder, last)
    except AttributeError:
        if not hasattr(holder, "__path__"):
            raise
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise AttributeError(str(error)) from error


@functools.cache
def raising() -> frozenset[str]:
    """Return the names whose calls raise."""
    unavailable = importlib.import_module("transformer_engine_torch.unavailable")
    return frozenset(f"transformer_engine_torch.{name}" for name in unavailable.__all__)


def status(name: str) -> str:
    """Return how a name stands."""
    if name in raising():
        return "raises"
    try:
        resolved(name)
    except AttributeError:
        return "absent"
    return "served"


def summary(names: list[Name]) -> str:
    """Return the counts by package, and the reasons of absent names, as Markdown."""
    reason_for = importlib.import_module("transformer_engine.common.absent")._reason_for
    counts = Counter((row.package, row.status) for row in names)
    lines = ["| package | names | served | raise | absent |", "| --- | --- | --- | --- | --- |"]
    for package in sorted({row.package for row in names}):
        served, raises, absent = (counts[package, kind] for kind in ("served", "raises", "absent"))
        lines.append(f"| `{package}` | {served + raises + absent} | {served} | {raises} | {absent} |")
    used = [row for row in names if row.source in USED]
    share = 100 * sum(row.status == "served" for row in used) / len(used)
    lines += [
        "",
        f"Of the {len(used)} names that the original's documentation or published packages use, {share:.1f} % are",
    ]
    lines += ["served.", "", "| absent | reason and replacement |", "| --- | --- |"]
    by_reason: dict[str, list[str]] = {}
    for row in names:
        if row.status == "absent":
            by_reason.setdefault(str(reason_for(row.name)), []).append(f"`{row.name}`")
    lines += [f"| {', '.join(group)} | {reason} |" for reason, group in by_reason.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Update both files, or compare them."""
    names = [row._replace(status=status(row.name)) for row in listed()]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([Name._fields, *names])
    if "--check" in sys.argv[1:] and text.getvalue() != NAMES.read_text():
        print(f"{NAMES.relative_to(ROOT)} is out of date; run python docs/{Path(__file__).name}")
        return 1
    NAMES.write_text(text.getvalue())
    return write(__file__, {PAGE: {"table of names": summary(names)}})


if __name__ == "__main__":
    sys.exit(main())
