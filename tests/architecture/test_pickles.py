"""Pickles are read through an allow-list only: an unrestricted load runs code from the file."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.source import modules, nodes


def is_unsafe_load(node: ast.AST) -> bool:
    """Whether a node is pickle.load(..), pickle.loads(..), or torch.load(..) without weights_only=True.

    `from pickle import loads` and `pickle.Unpickler` are not recognized.
    """
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
    if (owner, node.func.attr) == ("torch", "load"):
        safe = {keyword.arg: keyword.value for keyword in node.keywords}.get("weights_only")
        return not (isinstance(safe, ast.Constant) and safe.value is True)
    return (owner, node.func.attr) in {("pickle", "load"), ("pickle", "loads")}


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("torch.load(f)", True),
        ("torch.load(f, weights_only=False)", True),
        ("torch.load(f, weights_only=True)", False),
        ("pickle.loads(b)", True),
        ("json.load(f)", False),
    ],
)
def test_unrestricted_loads_are_found(call, expected):
    assert is_unsafe_load(ast.parse(call, mode="eval").body) == expected


def test_pickles_are_read_through_an_allow_list_only():
    unsafe_loads = [
        f"{name}:{getattr(node, 'lineno', 0)}"
        for name, path in modules().items()
        for node in nodes(path)
        if is_unsafe_load(node)
    ]
    assert not unsafe_loads
