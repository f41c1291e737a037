"""Pages, docstrings, comments and test names read as standard technical English, in short sentences.

The patterns are phrases that have a common technical word. A hit is not always wrong, so each folder may have one hit
per 1,000 words.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, modules, text

HITS_PER_1000_WORDS = 1.0
WORDS_PER_SENTENCE = 18.0

PHRASES = {
    r"whoever|nobody|somebody": "caller, user, no caller",
    r"refus(?:e|es|ed|al|als|ing)": "reject, raise, unsupported",
    r"(?:is|are) told": "receives, gets",
    r"(?:is|are) no (?!longer\b|more\b)[a-z]+": "is not a",
    r"there is none|is none of": "absent, None",
    r"answers (?:a|an|the|with|what|whether|for)": "returns",
    r"(?:ha(?:s|ve)) not (?!been\b)(?!yet\b)\w+": "does not have",
    r"what (?:is|was|it|they|follows|remains|comes|goes|lies)": "name the object",
    r"(?:lie|lies) (?:in|at|apart|behind|beside|where)": "is stored, is placed, strides",
    r"stands? (?:in|behind|beside|above|there)": "is placed",
    r"beside": "with, next to, in addition to",
    r"as (?:it is|they are)": "unchanged",
    r"(?:straight line|straight away|let go|mended|learnt)": "the term of the field",
    r"(?:is|are|was|were) cut|cut over": "split, sharded",
    r"but for": "except",
    r"goes (?:through|by|on|one by one)": "passes, continues",
    r"a (?:program|launch|row|token|layer|group|rank) a": "one per",
    r"of (?:its|their|one's) own": "its, a separate one",
    r"without which": "which is required",
}
PATTERN = re.compile("|".join(rf"\b(?:{phrase})\b" for phrase in PHRASES), re.IGNORECASE)
QUOTED = re.compile(r"`[^`]*`|\"[^\"]*\"")
DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
COMMENT = re.compile(r"^(?:.*\s)?#\s(.+)$", re.MULTILINE)
NAME_OF_TEST = re.compile(r"^\s*def test_(\w+)\(", re.MULTILINE)
SENTENCE_END = re.compile(r"[.!?:;](?:\s+|$)")


def prose_of_code(source: str) -> list[str]:
    """Docstrings, comments and test names in a file."""
    names = [name.replace("_", " ") for name in NAME_OF_TEST.findall(source)]
    return DOCSTRING.findall(source) + COMMENT.findall(source) + names


def paragraphs(page: str) -> Iterator[str]:
    """Paragraphs in a Markdown page, without code, tables, headings and link lists."""
    page = re.sub(r"```.*?```|<!--.*?-->", "", page, flags=re.DOTALL)
    for block in re.split(r"\n\s*\n", page):
        lines = [
            line for line in block.splitlines() if not re.match(r"\s*(\||#|!!!|\?\?\?|:::|<)", line)
        ]
        yield re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(lines)).strip()


def pages() -> list[Path]:
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]


def report_folder(path: Path) -> str:
    """Two folder levels, such as transformer_engine/jax; three in pytorch/ and common/, one in docs/."""
    parts = path.relative_to(ROOT).parent.parts
    return "/".join(
        parts[
            : 1 if parts[:1] == ("docs",) else 3 if parts[1:2] in (("pytorch",), ("common",)) else 2
        ]
    )


def rate(texts: list[str]) -> float:
    """Hits per 1,000 words."""
    plain = [QUOTED.sub("", one) for one in texts]
    words = sum(len(one.split()) for one in plain)
    return 1000 * sum(len(PATTERN.findall(one)) for one in plain) / max(words, 1)


@pytest.mark.parametrize(
    ("sentence", "hits"),
    [
        ("Whoever asks is told what it is.", 3),
        ("A name that is no tensor is refused.", 2),
        ("Return the reason why a request is unsupported; it no longer changes.", 0),
        ("The word `refuses` in code is not prose.", 0),
    ],
)
def test_phrases_are_found(sentence, hits):
    assert len(PATTERN.findall(QUOTED.sub("", sentence))) == hits


def above_the_limit(texts: dict[str, list[str]]) -> dict[str, float]:
    rates = {folder: round(rate(result), 2) for folder, result in texts.items()}
    return {folder: r for folder, r in rates.items() if r > HITS_PER_1000_WORDS}


def test_code_is_described_in_standard_technical_english():
    result: dict[str, list[str]] = defaultdict(list)
    rest = [
        path
        for folder in ("tests", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
    ]
    for path in [*modules().values(), *rest]:
        result[report_folder(path)] += prose_of_code(text(path))
    assert not above_the_limit(result), "use the words on the right of PHRASES"


def test_pages_are_written_in_standard_technical_english():
    result: dict[str, list[str]] = defaultdict(list)
    for page in pages():
        result[report_folder(page)] += paragraphs(page.read_text())
    assert not above_the_limit(result), "use the words on the right of PHRASES"


def test_sentences_in_pages_are_short():
    lengths = [
        len(sentence.split())
        for page in pages()
        for paragraph in paragraphs(page.read_text())
        for sentence in SENTENCE_END.split(paragraph)
        if len(sentence.split()) > 2
    ]
    assert sum(lengths) / len(lengths) < WORDS_PER_SENTENCE
