"""Size says something: long files and functions give their reason at the top, or are split."""

from __future__ import annotations

import ast

import pytest
from source import modules, tree

FILE_LINES = 400
FUNCTION_LINES = 60
KERNEL_LINES = 120


@pytest.mark.parametrize("name", modules())
def test_a_file_is_short_or_says_why_not(name):
    path = modules()[name]
    lines = len(path.read_text().splitlines())
    docstring = ast.get_docstring(tree(path)) or ""
    assert lines <= FILE_LINES or "Longer than" in docstring, f"{name} has {lines} lines"


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function's body: no signature, which may be a long public one, and no docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("name", modules())
def test_a_function_does_one_thing(name):
    limit = KERNEL_LINES if ".kernels." in name else FUNCTION_LINES
    for node in ast.walk(tree(modules()[name])):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert length(node) <= limit, f"{name}.{node.name} has {length(node)} lines"


def test_a_signature_and_a_docstring_are_no_length():
    source = 'def f(\n    a,\n    b,\n):\n    """One.\n\n    Two.\n    """\n    a = 1\n    return a\n'
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    assert length(function) == 2


@pytest.mark.parametrize("name", modules())
def test_every_module_begins_with_a_docstring(name):
    assert ast.get_docstring(tree(modules()[name])), name
