"""Functions do one thing; every module begins with a docstring. Ratios for whole files: test_readability."""

from __future__ import annotations

import ast

from tests.architecture.source import modules, nodes, tree

STATEMENTS = 50
KERNEL_STATEMENTS = 85


def statements(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Statement count of a function's body with nested ones, without the docstring.

    Unlike lines, statements cannot be packed, and line breaks by the formatter do not count.
    """
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return sum(isinstance(node, ast.stmt) for statement in body for node in ast.walk(statement))


def test_functions_are_short_enough_to_do_one_thing():
    long = {
        f"{name}.{node.name}": statements(node)
        for name, path in modules().items()
        for node in nodes(path)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and statements(node) > (KERNEL_STATEMENTS if ".kernels." in name else STATEMENTS)
    }
    assert not long, f"{{function: statements}}: {long}"


def test_nested_statements_count_and_docstrings_do_not():
    source = 'def f(\n    a,\n):\n    """One."""\n    if a:\n        a = g(\n            a,\n        )\n    return a\n'
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    assert statements(function) == 3


def test_every_module_begins_with_a_docstring():
    assert not [name for name, path in modules().items() if not ast.get_docstring(tree(path))]
