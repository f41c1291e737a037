"""File pairs that share five or more statement lines, to the letter or with other names, strings and numbers.

A line is a logical one, so that the formatter's line breaks and trailing commas do not count. Imports, decorators,
docstrings, `__all__` and punctuation do not count either. A run of five lines in more than eight places is a
convention and counts as no pair. A run that is equal in shape only must have four tokens per line on average and
two lines that do work.
"""

from __future__ import annotations

import functools
import io
import itertools
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

RUN = 5
MOST_PLACES = 8
FEWEST_TOKENS = 4 * RUN
FEWEST_STATEMENTS = 2
LONGEST_LINE = 2000

LETTERS = {tokenize.STRING: "s", tokenize.NAME: "x", tokenize.NUMBER: "0"}
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
SILENT = re.compile(r"[\s{}()\[\];,:.]*")
SILENT_WORDS = {"import", "from", "@", "__all__"}
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
    """A run of counted lines, from its first line number to its last."""

    file: str
    first: int
    last: int


def logical_lines(text: str) -> Iterator[list[tokenize.TokenInfo]]:
    """Tokens of each logical line, without layout, and without commas before a closing bracket."""
    line: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in LAYOUT:
            continue
        if token.type == tokenize.NEWLINE:
            yield line
            line = []
            continue
        if line and line[-1].string == "," and token.string in (")", "]", "}"):
            line.pop()
        line.append(token)


def extract_lines(text: str) -> list[Line]:
    """Logical lines in a source that count."""
    lines = []
    for tokens in logical_lines(text):
        is_docstring = len(tokens) == 1 and tokens[0].type == tokenize.STRING
        if is_docstring or tokens[0].string in SILENT_WORDS:
            continue
        line = " ".join(token.string for token in tokens)
        if len(line) <= LONGEST_LINE and not SILENT.fullmatch(line):
            shape = tuple(LETTERS.get(token.type, token.string) for token in tokens)
            lines.append(Line(tokens[0].start[0], line, shape, works(line, shape)))
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
    results: dict[tuple[str, str], tuple[Place, Place]] = {}
    for shared in places.values():
        if 1 < len(shared) <= MOST_PLACES:
            for a, b in itertools.combinations(sorted(shared), 2):
                if a.file != b.file or b.first > a.last:
                    results.setdefault((a.file, b.file), (a, b))
    return results
