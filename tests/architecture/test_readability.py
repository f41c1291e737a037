"""Ratios for names, English and density in the package: present values with a margin may only fall.

torch.nn has 22 "of" per 1,000 words in docstrings and comments, 2 % of functions named by a phrase, and 5
tokens per line. Totals have no limit: features may grow.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter

from tests.architecture.source import modules, text, tree

LIMITS = {
    '"of" per 1,000 words': 23.0,
    '"that of" and "those of" per 1,000 words': 0.1,
    'sentences with three or more "of", percent': 0.3,
    "variables named by a participle or an adverb, percent": 0.4,
    "functions named by a phrase, percent": 4.0,
    "tokens per line of code": 8.4,
    "records per 1,000 lines of code": 6.2,
    "`pyright: ignore` per 1,000 lines of code": 2.9,
}


def words(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


# Variable names that are participles or adverbs, and therefore do not name the value.
VAGUE = words(
    "again apart asked behind beside given held here kept known lies made others outside own place seen shown standing "
    "taken there together told turned want wanted whole"
)
PREPOSITIONS = words("at behind beside by for from in into of on over to under with within without")
FIRST_WORDS = words("from to with")  # conversions: from_bytes, to_codes, with_bias
PARTICIPLES = words(
    "begun chosen drawn found given grown held kept known laid left made named seen shown taken told written"
)
TERMS = words(
    "cached clamped compiled delayed dequantized distributed fused gated grouped interleaved masked nested normalized "
    "packed padded paged partitioned quantized replicated scaled sharded shared supported traced transposed truncated "
    "unsupported weighted"
)
NO_PARTICIPLES = words("embed feed forward need sched seed shed speed")
DENSE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def is_phrase(name: str) -> bool:
    """Whether a function's name is a participle (`chosen`) or has a preposition at an end (`facts_of`)."""
    parts = name.strip("_").split("_")
    first, last = parts[0], parts[-1]
    participle = first in PARTICIPLES or (
        first.endswith("ed") and first not in TERMS | NO_PARTICIPLES
    )
    return participle or last in PREPOSITIONS or first in PREPOSITIONS - FIRST_WORDS


def prose_counts(passages: list[str]) -> Counter[str]:
    """Words, sentences and genitives in docstrings and comments, without code in backticks."""
    counts: Counter[str] = Counter()
    for passage in passages:
        plain = re.sub(r"`[^`]*`", "", passage)
        counts["words"] += len(plain.split())
        counts["that of"] += len(re.findall(r"\b(?:that|those) of\b", plain, re.IGNORECASE))
        for sentence in re.split(r"(?<=[.!?:])\s+|\n\s*\n", plain):
            if len(sentence.split()) >= 4:
                genitives = len(re.findall(r"\bof\b", sentence))
                counts.update({"sentences": 1, "of": genitives, "chains": int(genitives >= 3)})
    return counts


def count_names(module: ast.Module) -> Counter[str]:
    """Functions, variables and records in a module, and how many have a vague name."""
    counts: Counter[str] = Counter()
    for node in ast.walk(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith(
            "__"
        ):
            counts.update({"functions": 1, "phrases": int(is_phrase(node.name))})
        stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        if stored or isinstance(node, ast.arg):
            name = node.arg if isinstance(node, ast.arg) else node.id  # pyright: ignore[reportAttributeAccessIssue]
            counts.update({"variables": 1, "vague": int(name in VAGUE)})
        if isinstance(node, ast.ClassDef):
            heads = [ast.unparse(head) for head in (*node.decorator_list, *node.bases)]
            counts["records"] += any("dataclass" in head or "NamedTuple" in head for head in heads)
    return counts


def count_code(source: str, docstrings: set[tuple[int, int]]) -> tuple[Counter[str], list[str]]:
    """Code tokens and lines, and the comments."""
    counts: Counter[str] = Counter()
    comments: list[str] = []
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.append(token.string[1:])
            counts["ignores"] += "pyright: ignore" in token.string
        if token.type not in DENSE and not (
            token.type == tokenize.STRING and token.start in docstrings
        ):
            counts["tokens"] += 1
            lines.update(range(token.start[0], token.end[0] + 1))
    counts["lines"] = len(lines)
    return counts, comments


def package_counts() -> Counter[str]:
    total: Counter[str] = Counter()
    for path in modules().values():
        module, docstrings, starts = tree(path), [], set()
        for node in ast.walk(module):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                docstring = ast.get_docstring(node, clean=False)
                if docstring is not None:
                    docstrings.append(docstring)
                    starts.add((node.body[0].lineno, node.body[0].col_offset))
        code, comments = count_code(text(path), starts)
        total += code + count_names(module) + prose_counts(docstrings + comments)
    return total


def test_ratios_only_fall():
    count = package_counts()
    results = {
        '"of" per 1,000 words': 1000 * count["of"] / count["words"],
        '"that of" and "those of" per 1,000 words': 1000 * count["that of"] / count["words"],
        'sentences with three or more "of", percent': 100 * count["chains"] / count["sentences"],
        "variables named by a participle or an adverb, percent": 100
        * count["vague"]
        / count["variables"],
        "functions named by a phrase, percent": 100 * count["phrases"] / count["functions"],
        "tokens per line of code": count["tokens"] / count["lines"],
        "records per 1,000 lines of code": 1000 * count["records"] / count["lines"],
        "`pyright: ignore` per 1,000 lines of code": 1000 * count["ignores"] / count["lines"],
    }
    assert results.keys() == LIMITS.keys()
    above = {
        ratio: (round(value, 2), LIMITS[ratio])
        for ratio, value in results.items()
        if value > LIMITS[ratio]
    }
    assert not above, f"{{ratio: (found, limit)}}: {above}"


def test_phrase_names_are_recognized():
    phrases = ("chosen", "_chosen_name", "facts_of", "in_order", "reducing_over", "rounded", "made")
    assert all(map(is_phrase, phrases))
    nouns = (
        "facts",
        "to_codes",
        "from_bytes",
        "with_bias",
        "fused_attention",
        "need_columns",
        "course_not",
        "seed",
    )
    assert not any(map(is_phrase, nouns))


def test_genitives_in_backticked_code_do_not_count():
    counts = prose_counts(["The scale of the codes of a tensor of `x of y`. That of it."])
    assert (counts["of"], counts["that of"], counts["sentences"]) == (3, 1, 1)
