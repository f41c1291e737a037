"""A module whose docstring begins with "Alias of" holds only a docstring and explicit names."""

from __future__ import annotations

import ast
import importlib

import pytest

from tests.architecture.source import modules, text, tree

# Found without parsing: every pytest process collects this file, and parsing the package takes two seconds.
ALIASES = [name for name, path in modules().items() if text(path).startswith('"""Alias of')]


def test_the_historic_paths_exist():
    for path in ("quantized_tensor", "fp8", "float8_tensor"):
        assert f"transformer_engine.pytorch.{path}" in ALIASES


@pytest.mark.parametrize("name", ALIASES)
def test_an_alias_contains_only_names(name):
    body = tree(modules()[name]).body[1:]
    for node in body:
        assigned = node.targets if isinstance(node, ast.Assign) else ()
        names = [target.id for target in assigned if isinstance(target, ast.Name)]
        getter = "absent.install_getter(__name__)"  # reports the missing attributes
        says = names == ["__all__"] or ast.unparse(node) == getter
        assert isinstance(node, ast.ImportFrom) or says, f"{name}:{node.lineno}"
        if isinstance(node, ast.ImportFrom):
            assert all(alias.name != "*" for alias in node.names), f"{name}:{node.lineno} imports *"


@pytest.mark.parametrize("name", ALIASES)
def test_an_alias_exports_its_names(name):
    module = importlib.import_module(name)
    assert all(hasattr(module, attribute) for attribute in module.__all__)
