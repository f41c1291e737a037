"""Code is not repeated: few file pairs share five or more statement lines."""

from __future__ import annotations

import subprocess

import pytest

from tests.architecture.repeats import find_repeats
from tests.architecture.source import PACKAGES, ROOT

# File pairs: public functions and passes with the original's signatures, reference quantizers, enumerations and
# `triton` wrappers, whose members are the original's too.
MOST_IN_THE_PRODUCT = 175
MOST = 240
# Pairs with a file in transformer_engine.jax: both frameworks' references, each in its own array type, the
# fields of modules that contain one another, and both frameworks' enumerations.
MOST_WITH_JAX = 75
# Programs to copy: each is complete in one file.
ALONE = "examples/"
OF_JAX = ("transformer_engine/jax/", "transformer_engine/common/quantize_spec.py", "tests/jax/")

BODY = """
total = 0
for row in rows:
    total += row.width * row.height
    if total > limit:
        raise ValueError(total)
    seen.append(row)
"""


def pairs(folders: tuple[str, ...]) -> list[str]:
    """Shared places among the Python files in some folders, as text."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    sources = {
        name: (ROOT / name).read_text()
        for name in listed
        if name.startswith(folders) and not name.startswith(ALONE) and (ROOT / name).is_file()
    }
    return [
        f"{a.file}:{a.first}-{a.last} ~ {b.file}:{b.first}-{b.last}"
        for a, b in find_repeats(sources).values()
    ]


def split_jax_pairs(result: list[str]) -> tuple[list[str], list[str]]:
    """The pairs without a file in transformer_engine.jax, and the pairs with one."""
    of_jax = [pair for pair in result if any(folder in pair for folder in OF_JAX)]
    return [pair for pair in result if pair not in of_jax], of_jax


def test_the_package_has_few_repeated_lines():
    result, of_jax = split_jax_pairs(pairs(tuple(f"{package}/" for package in PACKAGES)))
    assert len(result) <= MOST_IN_THE_PRODUCT, "\n".join(result)
    assert len(of_jax) <= MOST_WITH_JAX, "\n".join(of_jax)


def test_the_tree_has_few_repeated_lines():
    result, of_jax = split_jax_pairs(pairs(("",)))
    assert len(result) <= MOST, "\n".join(result)
    assert len(of_jax) <= MOST_WITH_JAX, "\n".join(of_jax)


def test_equal_lines_are_a_pair_despite_lines_between_them():
    spaced = BODY.replace("\n    if", "\n\n    # why\n    if")
    assert set(find_repeats({"a.py": BODY, "b.py": spaced})) == {("a.py", "b.py")}


def test_different_names_strings_and_numbers_do_not_hide_a_pair():
    renamed = BODY.replace("row", "line").replace("total", "size").replace("0", "7")
    assert set(find_repeats({"a.py": BODY, "b.py": renamed})) == {("a.py", "b.py")}


def test_a_file_may_repeat_itself_further_down():
    assert set(find_repeats({"a.py": BODY + BODY})) == {("a.py", "a.py")}


@pytest.mark.parametrize(
    "other",
    [
        BODY.replace("    seen.append(row)\n", "").replace("total = 0\n", ""),
        BODY.replace("if total > limit", "while total > limit or row"),
    ],
)
def test_fewer_than_five_lines_or_another_shape_are_not_a_pair(other):
    assert find_repeats({"a.py": BODY, "b.py": other}) == {}


def test_line_breaks_and_trailing_commas_do_not_hide_a_pair():
    wrapped = BODY.replace("seen.append(row)", "seen.append(\n        row,\n    )")
    assert set(find_repeats({"a.py": BODY, "b.py": wrapped})) == {("a.py", "b.py")}


def test_lines_in_more_than_eight_places_are_a_convention():
    assert len(find_repeats({f"{n}.py": BODY for n in range(8)})) == 8 * 7 // 2
    assert find_repeats({f"{n}.py": BODY for n in range(9)}) == {}


def test_field_lists_with_different_names_are_not_a_pair():
    fields = "".join(f"    first_{n}: int,\n" for n in range(6))
    assert find_repeats({"a.py": fields, "b.py": fields.replace("first", "second")}) == {}
