"""Files, functions and names are not split finer than a reader needs; `test_sizes` limits the other end."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable

from tests.architecture.source import modules, nodes, text

SMALL_FILE_LINES = 50
# The present ratios, which may only fall: the goals are 10 % and 65 functions per 1,000 lines.
SMALL_FILES = 0.123
FUNCTIONS_PER_1000_LINES = 73.5

# Twins of one concept in PyTorch and in JAX, and public names that the original has in several places.
TWINS = ("transformer_engine.pytorch", "transformer_engine.jax")


def code_lines(source: str, nodes: Iterable[ast.AST]) -> int:
    """Line count with code: no blank lines, comments and docstrings. Reading tokens takes twice as long."""
    documented: set[int] = set()
    strings: set[int] = set()
    for node in nodes:
        documents = isinstance(
            node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        )
        if documents and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            documented.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and node.end_lineno != node.lineno:
            strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    filled = {
        number
        for number, line in enumerate(source.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    }
    return len((filled | strings) - documented)


def functions(name: str) -> list[ast.AST]:
    return [
        node
        for node in nodes(modules()[name])
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]


def test_lines_of_code_leave_out_comments_and_docstrings():
    source = '"""One.\n\nTwo.\n"""\n\n# three\nx = (\n    1,\n)\n\n\ndef f():\n    """Four."""\n    return """\n#"""\n'
    assert code_lines(source, ast.walk(ast.parse(source))) == 6


def test_functions_are_worth_their_names():
    count = sum(len(functions(name)) for name in modules())
    lines = sum(code_lines(text(path), nodes(path)) for path in modules().values())
    assert 1000 * count <= FUNCTIONS_PER_1000_LINES * lines, (
        f"{count} functions in {lines} lines of code"
    )


def test_few_files_are_small():
    """Original paths that only contain names ("Alias of ..") do not count."""
    local = {
        name: text(path)
        for name, path in modules().items()
        if not text(path).startswith('"""Alias of')
    }
    small = [
        name for name, content in local.items() if len(content.splitlines()) <= SMALL_FILE_LINES
    ]
    assert len(small) <= SMALL_FILES * len(local), small


def test_a_class_name_has_one_meaning():
    """A framework uses a class name once, unless the name is public in each place."""
    defined = defaultdict(list)
    for name, path in modules().items():
        framework = next((side for side in TWINS if name.startswith(side)), "both")
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                defined[framework, node.name].append(name)
    twice = {
        name: places
        for (_, name), places in defined.items()
        if len(places) > 1 and name not in PUBLIC_TWICE
    }
    assert not twice, twice


# The original's public names: modules in `te` and operations in `te.ops`.
PUBLIC_TWICE = {"GroupedLinear", "L2Normalization", "LayerNorm", "Linear", "RMSNorm"}
