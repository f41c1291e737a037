"""Functions do one thing; every module begins with a docstring. Ratios for whole files: test_readability."""

from __future__ import annotations

import ast

from tests.architecture.source import modules, nodes, tree

FUNCTION_LINES = 60
KERNEL_LINES = 120


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Line count of a function's body: no signature, which may be a long public one, and no docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_functions_are_short_enough_to_do_one_thing():
    long = {
        f"{name}.{node.name}": length(node)
        for name, path in modules().items()
        for node in nodes(path)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and length(node) > (KERNEL_LINES if ".kernels." in name else FUNCTION_LINES)
    }
    assert not long, f"{{function: lines}}: {long}"


def test_signatures_and_docstrings_do_not_count():
    source = 'def f(\n    a,\n    b,\n):\n    """One.\n\n    Two.\n    """\n    a = 1\n    return a\n'
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    assert length(function) == 2


def test_every_module_begins_with_a_docstring():
    assert not [name for name, path in modules().items() if not ast.get_docstring(tree(path))]
