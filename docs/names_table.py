"""Write the status of each name into docs/names.csv, and a summary into docs/support.md; --check only compares them.

python docs/names_table.py [--check] [--original DIRECTORY [--signatures]]

The file lists the public names of release 2.20 of the original: name, kind, status, source, section and weight. A name
is "served" if it exists here, "raises" if a call of it raises an error with the replacement, and "absent" otherwise.
The reasons of absent names are rows of transformer_engine/common/absent.py. The source is clients (published packages
that import the name), documentation, tests (code written against the original), reference, or installed. Names that a
release added have the section of its description, and a weight: A for any user, B for a documented feature or a
client's branch, C for authors of extensions.

--original reads an installed original, whose packages are in DIRECTORY: another process imports its public modules and
prints names and signatures, no source. Names that the file lacks become rows of source "installed". Absent methods and
the differences of signatures from this package, methods included, are printed. --signatures also enters the signatures
that differ into docs/signatures.json, so that a test fails until they are equal; see CONTRIBUTING.md.
"""

from __future__ import annotations

import argparse
import csv
import functools
import importlib
import inspect
import io
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from generated import ROOT, write

NAMES = ROOT / "docs" / "names.csv"
SIGNATURES = ROOT / "docs" / "signatures.json"
PAGE = ROOT / "docs" / "support.md"
USED = ("documentation", "clients")


class Name(NamedTuple):
    """A public name of the original."""

    name: str
    kind: str
    status: str
    source: str
    section: str = ""
    weight: str = ""

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
    """Return the status of a name: served, raises or absent."""
    if name in raising():
        return "raises"
    try:
        resolved(name)
    except AttributeError:
        return "absent"
    return "served"


def weights(names: list[Name]) -> list[str]:
    """Return the counts of the names of release 2.20 by section and weight, as lines of Markdown."""
    counts = Counter((row.section, row.weight, row.status) for row in names if row.weight)
    lines = ["| section of release 2.20 | weight | names | served | raise | absent |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    for section, weight in sorted({key[:2] for key in counts}, key=lambda key: (int(key[0]), key[1])):
        served, raises, absent = (counts[section, weight, word] for word in ("served", "raises", "absent"))
        lines.append(
            f"| {section} | {weight} | {served + raises + absent} | {served} | {raises} | {absent} |"
        )
    return lines


def summary(names: list[Name]) -> str:
    """Return the counts by package, and the reasons of absent names, as Markdown."""
    reason_for = importlib.import_module("transformer_engine.common.absent")._find_reason
    counts = Counter((row.package, row.status) for row in names)
    lines = ["| package | names | served | raise | absent |", "| --- | --- | --- | --- | --- |"]
    for package in sorted({row.package for row in names}):
        served, raises, absent = (counts[package, kind] for kind in ("served", "raises", "absent"))
        lines.append(f"| `{package}` | {served + raises + absent} | {served} | {raises} | {absent} |")
    lines += ["", *weights(names)]
    used = [row for row in names if row.source in USED]
    share = 100 * sum(row.status == "served" for row in used) / len(used)
    lines += [
        "",
        f"Of the {len(used)} names that the original's documentation or published packages use, {share:.1f} % are",
    ]
    lines += ["served.", "", *_reasons(names, "absent", reason_for)]
    lines += ["", *_reasons(names, "raises", _error)]
    return "\n".join(lines) + "\n"


def _reasons(names: list[Name], status: str, reason_for: Callable[[str], Any]) -> list[str]:
    """Return the names of a status by reason, as a table of Markdown."""
    by_reason: dict[str, list[str]] = {}
    for row in names:
        if row.status == status:
            by_reason.setdefault(str(reason_for(row.name)), []).append(f"`{row.name}`")
    lines = [f"| {status} | reason and replacement |", "| --- | --- |"]
    return lines + [f"| {', '.join(group)} | {reason} |" for reason, group in by_reason.items()]


def _error(name: str) -> str:
    """Return the reason in the docstring of a function that raises."""
    first_line = str(resolved(name).__doc__).partition("\n")[0]
    return first_line.removeprefix("Raise NotImplementedError: ").removesuffix(".")


def kind(value: Any) -> str:
    """Return the kind of a row: module, class, function or value."""
    if inspect.ismodule(value):
        return "module"
    if isinstance(value, type):
        return "class"
    return "function" if callable(value) else "value"


# Prints {name: [kind, parameters or null]} of the public names that modules of the packages define, as JSON. Functions
# of a class have the kind "method", and are listed with the first name of their class.
_WALK = """
import importlib, inspect, json, os, pkgutil, sys
found = {}
classes = set()
def parameters(value):
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return None
    kept = []
    for p in signature.parameters.values():
        plain = p.default is None or isinstance(p.default, (bool, int, float, str))
        default = None if p.default is p.empty else repr(p.default) if plain else "..."
        kept.append([p.name, p.kind.name, default])
    return kept
def visit(module):
    found[module.__name__] = ["module", None]
    for name, value in list(vars(module).items()):
        home = getattr(value, "__module__", module.__name__)
        if name.startswith("_") or inspect.ismodule(value) or not str(home).startswith(PACKAGES):
            continue
        word = "class" if isinstance(value, type) else "function" if callable(value) else "value"
        found[module.__name__ + "." + name] = [word, parameters(value) if callable(value) else None]
        if isinstance(value, type) and value not in classes:
            classes.add(value)
            for attribute, held in list(vars(value).items()):
                plain = getattr(held, "__func__", held)  # of static and class methods
                if not attribute.startswith("_") and inspect.isroutine(plain):
                    method = parameters(getattr(value, attribute))
                    found[module.__name__ + "." + name + "." + attribute] = ["method", method]
PACKAGES = tuple(sys.argv[2:])
DIRECTORY = os.path.realpath(sys.argv[1])
for package in PACKAGES:
    try:
        root = importlib.import_module(package)
    except ImportError as error:
        print(f"{package}: {error}", file=sys.stderr)
        continue
    if not os.path.realpath(root.__path__[0]).startswith(DIRECTORY + os.sep):
        print(f"{package} is in {root.__path__[0]}, not in {DIRECTORY}", file=sys.stderr)
        continue
    visit(root)
    for info in pkgutil.walk_packages(getattr(root, "__path__", ()), package + ".", onerror=lambda name: None):
        try:
            visit(importlib.import_module(info.name))
        except Exception as error:
            print(f"{info.name}: {error}", file=sys.stderr)
print(json.dumps(found))
"""


def installed(directory: Path) -> dict[str, list[Any]]:
    """Return {name: [kind, parameters]} of the original that is installed in a directory.

    Modules that cannot be imported are reported on the error stream.

    Raises:
        RuntimeError: The process found no name; its errors are in the message.
    """
    environment = os.environ | {"PYTHONPATH": str(directory)}
    packages = ("transformer_engine", "transformer_engine_torch", "transformer_engine_jax")
    command = [sys.executable, "-c", _WALK, str(directory), *packages]
    process = subprocess.run(
        command, env=environment, cwd=directory, capture_output=True, text=True, check=False
    )
    found = json.loads(process.stdout.splitlines()[-1]) if process.returncode == 0 and process.stdout else {}
    if not found:
        raise RuntimeError(f"no public name was found in {directory}: {process.stderr.strip()[-2000:]}")
    sys.stderr.write(process.stderr)
    return found


def with_installed(names: list[Name], found: dict[str, list[Any]]) -> list[Name]:
    """Return the rows with one more for each name of an installed original that the file lacks."""
    known = {row.name for row in names}
    more = [
        Name(name, word, "", "installed")
        for name, (word, _) in found.items()
        if name not in known and word != "method"
    ]
    return sorted([*names, *more])


def signature_differences(found: dict[str, list[Any]]) -> dict[str, str]:
    """Return {name: difference} of the callables here whose parameters begin with other names, kinds or defaults.

    Methods of the original that a class here lacks are not among them; `absent_methods` returns those.
    """
    lines = {}
    for name, (_, theirs) in sorted(found.items()):
        try:
            own = list(inspect.signature(resolved(name)).parameters.values()) if theirs is not None else None
        except (AttributeError, TypeError, ValueError, ImportError):
            continue
        if own is None:
            continue
        ours = [[p.name, p.kind.name, None if p.default is p.empty else repr(p.default)] for p in own]
        for place, wanted in enumerate(theirs or ()):
            match = ours[place] if place < len(ours) else None
            same_default = match is not None and (wanted[2] in (None, "...") or wanted[2] == match[2])
            if match is None or match[:2] != wanted[:2] or not same_default:
                lines[name] = f"{name}[{place}]: {wanted} in the original, {match} here"
                break
    return lines


def absent_methods(found: dict[str, list[Any]]) -> list[str]:
    """Return the methods of an installed original that the class of the same name here lacks."""
    missing = []
    for name, (word, _) in sorted(found.items()):
        try:
            if word == "method" and not hasattr(resolved(name.rpartition(".")[0]), name.rpartition(".")[2]):
                missing.append(name)
        except (AttributeError, ImportError):  # the class is absent too
            continue
    return missing


def parameters_text(parameters: list[list[Any]]) -> str:
    """Return parameters as the text of a row of signatures.json, "a, b=1, *, c=None"; other defaults are left out."""
    words, keyword_only = [], False
    for name, kind_name, default in parameters:
        if kind_name in ("VAR_POSITIONAL", "VAR_KEYWORD"):
            words.append(f"{'*' if kind_name == 'VAR_POSITIONAL' else '**'}{name}")
            keyword_only = keyword_only or kind_name == "VAR_POSITIONAL"
            continue
        if kind_name == "KEYWORD_ONLY" and not keyword_only:
            words.append("*")
            keyword_only = True
        words.append(name if default in (None, "...") else f"{name}={default}")
    return ", ".join(words)


def signature_rows(text: str, found: dict[str, list[Any]], names: Iterable[str]) -> str:
    """Return the text of signatures.json with the signatures that an installed original has for these names.

    The text has only literal defaults. A positional parameter without one, after a parameter with one, ends the row.
    """
    rows = json.loads(text)
    for name in sorted(names):
        kept: list[list[Any]] = []
        defaults = False
        for parameter in found[name][1]:
            literal = parameter[2] not in (None, "...")
            if defaults and not literal and parameter[1] == "POSITIONAL_OR_KEYWORD":
                break
            defaults = defaults or literal
            kept.append(parameter)
        rows[name] = {"section": rows.get(name, {}).get("section", 0), "parameters": parameters_text(kept)}
    lines = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(rows.items())]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> int:
    """Update both files, or compare them."""
    parser = argparse.ArgumentParser(description="names of the original and how they stand")
    parser.add_argument("--check", action="store_true", help="compare the files instead of writing them")
    parser.add_argument("--original", type=Path, help="directory with an installed original")
    parser.add_argument("--signatures", action="store_true", help="enter its signatures that differ")
    options = parser.parse_args()
    names = listed()
    if options.original is not None:
        found = installed(options.original)
        names = with_installed(names, found)
        different = signature_differences(found)
        print("\n".join(different.values()))
        print("\n".join(f"{name}: absent here" for name in absent_methods(found)))
        if options.signatures:
            SIGNATURES.write_text(signature_rows(SIGNATURES.read_text(), found, different))
    names = [row._replace(status=status(row.name)) for row in names]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([Name._fields, *names])
    if options.check and text.getvalue() != NAMES.read_text():
        print(f"{NAMES.relative_to(ROOT)} is out of date; run python docs/{Path(__file__).name}")
        return 1
    NAMES.write_text(text.getvalue())
    return write(__file__, {PAGE: {"table of names": summary(names)}})


if __name__ == "__main__":
    sys.exit(main())
