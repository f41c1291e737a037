"""Files, functions and names are not split finer than a reader needs; `test_sizes` holds the other end."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict

from tests.architecture.source import modules, nodes, text

SMALL_FILE_LINES = 50
# The present numbers, which may only fall: the goals are 80 small files and 65 functions per 1,000 lines.
SMALL_FILES = 96
FUNCTIONS_PER_1000_LINES = 82

WITHOUT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
# Twins of one concept in PyTorch and in JAX, and public names that the original has in several places.
TWINS = ("transformer_engine.pytorch", "transformer_engine.jax")


def code_lines(source: str) -> int:
    """The number of lines with code: no blank lines, comments and docstrings."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        documents = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documents and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            documented.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in WITHOUT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


def functions(name: str) -> list[ast.AST]:
    return [
        node for node in nodes(modules()[name]) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]


def test_lines_of_code_leave_out_comments_and_docstrings():
    assert (
        code_lines(
            '"""One.\n\nTwo.\n"""\n\n# three\nx = (\n    1,\n)\n\n\ndef f():\n    """Four."""\n    return x\n'
        )
        == 5
    )


def test_functions_are_worth_their_names():
    count = sum(len(functions(name)) for name in modules())
    lines = sum(code_lines(text(path)) for path in modules().values())
    assert 1000 * count <= FUNCTIONS_PER_1000_LINES * lines, f"{count} functions in {lines} lines of code"


def test_few_files_are_small():
    small = [name for name, path in modules().items() if len(text(path).splitlines()) <= SMALL_FILE_LINES]
    assert len(small) <= SMALL_FILES, small


def test_a_class_name_has_one_meaning():
    """A framework uses a class name once, unless the name is public in each place."""
    defined = defaultdict(list)
    for name, path in modules().items():
        framework = next((side for side in TWINS if name.startswith(side)), "both")
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                defined[framework, node.name].append(name)
    twice = {
        name: places for (_, name), places in defined.items() if len(places) > 1 and name not in PUBLIC_TWICE
    }
    assert not twice, twice


# Public names of the original: modules of `te` and operations of `te.ops`.
PUBLIC_TWICE = {"GroupedLinear", "L2Normalization", "LayerNorm", "Linear", "RMSNorm"}
