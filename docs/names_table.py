"""Write each public original name's status into docs/names.csv, and a summary into docs/support.md.

python docs/names_table.py [--check] [--original DIRECTORY [--signatures]]

The columns of names.csv:
    name, kind: Dotted name; module, class, function or value.
    status: "served" if the name exists here, "raises" if calling it raises an error with the replacement,
        otherwise "absent".
    source: Where the name is used: clients (published packages that import it), documentation, tests (code written
        against the original), reference, or installed (found by --original).
    section, weight: For names that a release added: the subject, a key in `SECTIONS`, and A for any user, B
        for a documented feature or a client's branch, C for extension authors.
    reason: Why a name is absent or raises, from transformer_engine/common/absent.py or the function's docstring.

--original compares with an original that is installed in DIRECTORY, whose public modules another process imports; no
source is printed. Names that names.csv lacks become rows of source "installed". Printed are signatures that differ from
this package (methods included), absent methods, and names of either file that the original has removed.

--signatures also enters the signatures that differ into docs/signatures.json; a test fails until they are equal.

--check writes nothing; the exit status is 1 if a file would change. CONTRIBUTING.md describes how to take in a new
release.
"""

from __future__ import annotations

import argparse
import csv
import functools
import importlib
import io
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import installed_names
from generated import ROOT, write
from installed_names import OTHER, Parameter, parameters

NAMES = ROOT / "docs" / "names.csv"
SIGNATURES = ROOT / "docs" / "signatures.json"
PAGE = ROOT / "docs" / "support.md"
USED = ("documentation", "clients")
NO_REASON = "no reason is stated; add a row to transformer_engine/common/absent.py"
# Section subjects; the "section" columns in both files contain their numbers.
SECTIONS = {
    "1": "softcap of attention",
    "2": "Newton-Schulz iteration",
    "3": "parallel cross-entropy",
    "4": "linear attention",
    "5": "policies of packed sequences",
    "6": "load balancing of context parallelism",
    "7": "fusible operations and the router",
    "8": "fused query projection of MLA",
    "9": "grouped tensors",
    "10": "torch.compile of quantized tensors",
    "11": "other functions of the extension",
    "12": "sharded weights and debug features",
    "13": "changed signatures",
    "14": "JAX",
    "15": "recipes and environment variables",
    "16": "deprecations",
}


class Name(NamedTuple):
    """A public name in the original."""

    name: str
    kind: str
    status: str
    source: str
    section: str = ""
    weight: str = ""
    reason: str = ""

    @property
    def package(self) -> str:
        """The framework's package, or the root package."""
        parts = self.name.split(".")
        return ".".join(
            parts[
                : 2
                if parts[:2] in (["transformer_engine", "pytorch"], ["transformer_engine", "jax"])
                else 1
            ]
        )


def read_rows() -> list[Name]:
    """Read the file's rows."""
    with NAMES.open(newline="") as file:
        return [Name(**row) for row in csv.DictReader(file)]


def resolve_name(name: str) -> Any:
    """Resolve a dotted name, an attribute before a module; AttributeError if it does not exist."""
    position, _, last = name.rpartition(".")
    if not position:
        return importlib.import_module(name)
    try:
        holder = importlib.import_module(position)
    except ModuleNotFoundError:  # a class
        holder = resolve_name(position)
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
    """Status: served, raises or absent."""
    if name in raising():
        return "raises"
    try:
        resolve_name(name)
    except AttributeError:
        return "absent"
    return "served"


def settle_row(row: Name) -> Name:
    """The row with the present status, and the reason of an absent name or a name that raises."""
    current = status(row.name)
    reason = ""
    if current == "absent":
        reasons = importlib.import_module("transformer_engine.common.absent")
        reason = reasons._find_reason(row.name) or NO_REASON
    if current == "raises":
        first_line = str(resolve_name(row.name).__doc__).partition("\n")[0]
        reason = first_line.removeprefix("Raise NotImplementedError: ").removesuffix(".")
    return row._replace(status=current, reason=reason)


def weights(names: list[Name]) -> list[str]:
    """Count the names that a release added, by section and weight, as Markdown lines."""
    counts = Counter((row.section, row.weight, row.status) for row in names if row.weight)
    lines = ["| section | subject | weight | names | served | raise | absent |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for section, weight in sorted(
        {key[:2] for key in counts}, key=lambda key: (_number(key[0]), key)
    ):
        served, raises, absent = (
            counts[section, weight, word] for word in ("served", "raises", "absent")
        )
        total = served + raises + absent
        subject = SECTIONS.get(section, "")
        lines.append(
            f"| {section} | {subject} | {weight} | {total} | {served} | {raises} | {absent} |"
        )
    return lines


def _number(section: str) -> float:
    """Sort key: numbered sections in order, then the others."""
    return int(section) if section.isdecimal() else float("inf")


def summary(names: list[Name]) -> str:
    """Counts by package, and reasons for absent names, as Markdown."""
    counts = Counter((row.package, row.status) for row in names)
    lines = ["| package | names | served | raise | absent |", "| --- | --- | --- | --- | --- |"]
    for package in sorted({row.package for row in names}):
        served, raises, absent = (counts[package, word] for word in ("served", "raises", "absent"))
        lines.append(
            f"| `{package}` | {served + raises + absent} | {served} | {raises} | {absent} |"
        )
    lines += ["", *weights(names)]
    used = [row for row in names if row.source in USED]
    share = 100 * sum(row.status == "served" for row in used) / len(used)
    lines += [
        "",
        f"Of the {len(used)} names that the original's documentation or published packages use, {share:.1f} % are",
        "served.",
    ]
    for word in ("absent", "raises"):
        lines += ["", *_reasons(names, word)]
    return "\n".join(lines) + "\n"


def _reasons(names: list[Name], word: str) -> list[str]:
    """Names with a status by reason, as a Markdown table."""
    by_reason: dict[str, list[str]] = {}
    for row in names:
        if row.status == word:
            by_reason.setdefault(row.reason, []).append(f"`{row.name}`")
    lines = [f"| {word} | reason and replacement |", "| --- | --- |"]
    return lines + [f"| {', '.join(group)} | {reason} |" for reason, group in by_reason.items()]


class Original(NamedTuple):
    """Public names in an installed original.

    Attributes:
        found: {name: [kind, parameters]} for its public names; see `installed_names`.
        removed: The names in the two files that it lacks.
    """

    found: dict[str, list[Any]]
    removed: list[str]


def original_names(directory: Path, names: Iterable[str]) -> Original:
    """Public names in the original that is installed in a directory, and which of `names` it lacks.

    Modules that cannot be imported are reported on the error stream.

    Raises:
        RuntimeError: The process found no name; its errors are in the message.
    """
    directory = directory.resolve()
    environment = os.environ | {"PYTHONPATH": str(directory)}
    packages = ("transformer_engine", "transformer_engine_torch", "transformer_engine_jax")
    command = [sys.executable, installed_names.__file__, str(directory), *packages]
    process = subprocess.run(
        command,
        env=environment,
        input=json.dumps(list(names)),
        capture_output=True,
        text=True,
        check=False,
    )
    lines = process.stdout.splitlines() if process.returncode == 0 else []
    original = Original(**json.loads(lines[-1])) if lines else Original({}, [])
    if not original.found:
        raise RuntimeError(
            f"no public name was found in {directory}: {process.stderr.strip()[-2000:]}"
        )
    sys.stderr.write(process.stderr)
    return original


def with_installed(names: list[Name], found: dict[str, list[Any]]) -> list[Name]:
    """Add one row for each name that an installed original has and the file lacks."""
    recognized = {row.name for row in names}
    more = [
        Name(name, word, "", "installed")
        for name, (word, _) in found.items()
        if name not in recognized and word != "method"
    ]
    return sorted([*names, *more])


def signature_differences(found: dict[str, list[Any]]) -> dict[str, str]:
    """{name: difference} for callables here whose parameters begin with other names, kinds or defaults.

    Original methods that a class here lacks are not included; `absent_methods` returns those.
    """
    lines = {}
    for name, (_, theirs) in sorted(found.items()):
        if theirs is None:
            continue
        try:
            ours = parameters(resolve_name(name))
        except (AttributeError, ImportError):
            continue
        if ours is None:
            continue
        for index, expected in enumerate(theirs):
            match = ours[index] if index < len(ours) else None
            same_default = match is not None and (
                expected[2] in (None, OTHER) or expected[2] == match[2]
            )
            if match is None or match[:2] != expected[:2] or not same_default:
                lines[name] = f"{name}[{index}]: {expected} in the original, {match} here"
                break
    return lines


def absent_methods(found: dict[str, list[Any]]) -> list[str]:
    """Methods in an installed original that the class with the same name here lacks."""
    missing = []
    for name, (word, _) in sorted(found.items()):
        try:
            if word == "method" and not hasattr(
                resolve_name(name.rpartition(".")[0]), name.rpartition(".")[2]
            ):
                missing.append(name)
        except (AttributeError, ImportError):  # the class is absent too
            continue
    return missing


def parameters_text(callable_parameters: Iterable[Parameter]) -> str:
    """Format parameters for a row in signatures.json, "a, b=1, *, c=None"; other defaults are left out."""
    words, keyword_only = [], False
    for name, kind_name, default in callable_parameters:
        if kind_name in ("VAR_POSITIONAL", "VAR_KEYWORD"):
            words.append(f"{'*' if kind_name == 'VAR_POSITIONAL' else '**'}{name}")
            keyword_only = keyword_only or kind_name == "VAR_POSITIONAL"
            continue
        if kind_name == "KEYWORD_ONLY" and not keyword_only:
            words.append("*")
            keyword_only = True
        words.append(str(name) if default in (None, OTHER) else f"{name}={default}")
    return ", ".join(words)


def signature_rows(text: str, found: dict[str, list[Any]], names: Iterable[str]) -> str:
    """New text for signatures.json, with an installed original's signatures for these names.

    The text has only literal defaults. A positional parameter without one, after a parameter with one, ends the row.
    """
    rows = json.loads(text)
    for name in sorted(names):
        saved: list[list[Any]] = []
        defaults = False
        for parameter in found[name][1]:
            literal = parameter[2] not in (None, OTHER)
            if defaults and not literal and parameter[1] == "POSITIONAL_OR_KEYWORD":
                break
            defaults = defaults or literal
            saved.append(parameter)
        rows[name] = {
            "section": rows.get(name, {}).get("section", 0),
            "parameters": parameters_text(saved),
        }
    lines = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(rows.items())]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> int:
    """Update the files and the page, or compare them."""
    parser = argparse.ArgumentParser(description="names of the original and how they stand")
    parser.add_argument(
        "--check", action="store_true", help="compare the files instead of writing them"
    )
    parser.add_argument("--original", type=Path, help="directory with an installed original")
    parser.add_argument(
        "--signatures", action="store_true", help="enter its signatures that differ"
    )
    options = parser.parse_args()
    names, signatures = read_rows(), SIGNATURES.read_text()
    if options.original is not None:
        original = original_names(
            options.original, [*(row.name for row in names), *json.loads(signatures)]
        )
        names = with_installed(names, original.found)
        different = signature_differences(original.found)
        lines = [
            *different.values(),
            *(f"{name}: absent here" for name in absent_methods(original.found)),
        ]
        lines += [f"{name}: the original has removed it" for name in original.removed]
        print("\n".join(lines))
        if options.signatures:
            signatures = signature_rows(signatures, original.found, different)
    elif options.signatures:
        parser.error("--signatures needs --original, whose signatures it enters")
    names = [settle_row(row) for row in names]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([Name._fields, *names])
    stale = 0
    for path, content in ((NAMES, text.getvalue()), (SIGNATURES, signatures)):
        if content == path.read_text():
            continue
        if options.check:
            print(f"{path.relative_to(ROOT)} is out of date; run python docs/{Path(__file__).name}")
            stale = 1
        else:
            path.write_text(content)
    return write(__file__, {PAGE: {"table of names": summary(names)}}) or stale


if __name__ == "__main__":
    sys.exit(main())
