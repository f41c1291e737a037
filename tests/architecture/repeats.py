"""File pairs that share six or more lines, to the letter or with other names, strings and numbers.

A line counts when it contains more than punctuation, a comment, a docstring's edge, an import or an entry in
`__all__`; white space is folded. A run of six such lines in more than eight places is a convention and counts
as no pair. A run that is equal in shape only must have four tokens per line on average and two lines that do
work.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

RUN = 6
MOST_PLACES = 8
FEWEST_TOKENS = 4 * RUN
FEWEST_STATEMENTS = 2
LONGEST_LINE = 2000

TOKEN = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<name>[A-Za-z_]\w*)|(?P<number>[0-9][0-9a-fA-FxX_.]*)|\S""",
    re.ASCII,
)
LETTERS = {"string": "s", "name": "x", "number": "0"}
SILENT = re.compile(r"[\s{}()\[\];,:.]*|(?:#|/\*|\*(?!/)|'''|\"\"\"|import\b|from \S+ import\b).*", re.DOTALL)
OPENS_NAMES = re.compile(r"(from \S+ import \(|__all__ = \[)(?: *#.*)?")
VERBS = re.compile(
    r"(if|for|while|return|elif|else|try|except|with|raise|yield|await|del|assert|continue|break)"
)
# "name: value,": an entry in a list, not work.
SIDE = r"(?:x )?[sx0_](?: [:.] [:.]? ?x)*(?: \( [sx0_ .:,]*\)?)?"
ENTRY = re.compile(rf"{SIDE} : {SIDE} ,?")


class Line(NamedTuple):
    """One line that counts: its number, its words, its shape, and whether it does something."""

    number: int
    text: str
    shape: tuple[str, ...]
    works: bool


class Place(NamedTuple):
    """A run of six counted lines, from its first line number to its last."""

    file: str
    first: int
    last: int


def extract_lines(text: str) -> list[Line]:
    """Lines in a source that count."""
    lines = []
    in_names = False  # within an import over several lines, or within __all__
    for number, raw in enumerate(text.split("\n"), 1):
        line = " ".join(raw.split())
        in_names = (in_names and not line.startswith((")", "]"))) or OPENS_NAMES.fullmatch(line) is not None
        if in_names:
            continue
        if 3 <= len(line) <= LONGEST_LINE and not SILENT.fullmatch(line):
            shape = tuple(LETTERS.get(m.lastgroup or "", m.group()) for m in TOKEN.finditer(line))
            lines.append(Line(number, line, shape, works(line, shape)))
    return lines


def works(line: str, shape: tuple[str, ...]) -> bool:
    """Whether a line begins with a verb, assigns or is long, and is neither a class line nor a list entry."""
    if ENTRY.fullmatch(" ".join(shape)):
        return False
    first = re.search(r"[A-Za-z_]\w*", line)
    word = first.group() if first else ""
    if VERBS.fullmatch(word):
        return True
    if word == "class" and shape[-1] in "{(:" and "=" not in shape:
        return False
    return _assigns(shape) or len(shape) >= 8


def _assigns(shape: tuple[str, ...]) -> bool:
    around = zip(("", *shape), shape, (*shape[1:], ""), strict=False)
    return any(
        token == "=" and before not in ("=", "!", "<", ">") and after not in ("=", ">")
        for before, token, after in around
    )


@functools.cache
def runs(file: str, text: str) -> tuple[tuple[tuple, Place], ...]:
    """(key, place) for every run in a file: keyed by its text and, if it is long enough, by its shape."""
    return tuple(_runs(file, text))


def _runs(file: str, text: str) -> Iterator[tuple[tuple, Place]]:
    lines = extract_lines(text)
    for start in range(len(lines) - RUN + 1):
        run = lines[start : start + RUN]
        position = Place(file, run[0].number, run[-1].number)
        yield ("letter", *(line.text for line in run)), position
        says = sum(len(line.shape) for line in run) >= FEWEST_TOKENS
        if says and sum(line.works for line in run) >= FEWEST_STATEMENTS:
            yield ("shape", *(line.shape for line in run)), position


def find_repeats(sources: Mapping[str, str]) -> dict[tuple[str, str], tuple[Place, Place]]:
    """{(file, file): one shared run} over {file: text}; a file repeats itself at distinct places."""
    places: dict[tuple, list[Place]] = defaultdict(list)
    for file in sorted(sources):
        for run, index in runs(file, sources[file]):
            places[run].append(index)
    found: dict[tuple[str, str], tuple[Place, Place]] = {}
    for shared in places.values():
        if 1 < len(shared) <= MOST_PLACES:
            for a, b in itertools.combinations(sorted(shared), 2):
                if a.file != b.file or b.first > a.last:
                    found.setdefault((a.file, b.file), (a, b))
    return found
