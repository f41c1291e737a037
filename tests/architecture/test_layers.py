"""Imports go down only: a module may import its own layer and those below, and no modules import in a circle."""

from __future__ import annotations

import ast

import pytest

from tests.architecture import source
from tests.architecture.layers_of_modules import layer
from tests.architecture.source import (
    circles,
    find_computed_imports,
    find_loaded_modules,
    imports,
    modules,
    nodes,
    tree,
)


def test_a_module_imports_nothing_above_its_layer():
    upward = [
        f"{name}:{line} (layer {layer(name)}) imports {target} ({layer(target)})"
        for name in modules()
        for target, line in imports(name)
        if layer(target) > layer(name)
    ]
    assert not upward, "\n".join(upward)


def test_the_engine_imports_no_tools():
    importing = [
        f"{name}:{line} imports {target}"
        for name in modules()
        for target, line in imports(name)
        if target.startswith("transformer_engine_tools")
        and not name.startswith("transformer_engine_tools")
    ]
    assert [line.partition(":")[0] for line in importing] == ["transformer_engine.__main__"], (
        "\n".join(importing)
    )


# Modules that import by names from a table or from the user.
IMPORTS_BY_A_TABLE = {
    "transformer_engine": "frameworks and aliases, on first access",
    "transformer_engine_tools": "the module of a command, when it runs",
    "transformer_engine_tools.bench.providers.in_jax": "one builder for each framework",
    "transformer_engine_tools.demo.trainer": "one loop for each framework",
    "transformer_engine.common.absent": "public modules of a framework, when they are first used as attributes",
    "transformer_engine.common.folder": "the modules of the caller's own folder",
    "transformer_engine.common.optional": "other libraries",
    "transformer_engine.pytorch": "its own subpackages, on first access",
    "transformer_engine.pytorch.integrations.megatron.equivalents": "modules of Megatron-core",
    "transformer_engine.pytorch.runtime.plugins": "the user's module that NVTE_PLUGIN names",
}


def test_dynamic_imports_name_a_constant():
    computed = {name: lines for name in modules() if (lines := find_computed_imports(name))}
    assert computed.keys() == IMPORTS_BY_A_TABLE.keys(), computed


def test_dynamic_imports_count_as_imports(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text(
        "import importlib\n"
        "b = importlib.import_module('..other.b', __name__)\n"
        "c = importlib.import_module('.c', __package__)\n"
        "d = importlib.import_module(f'{b}.d')\n"
    )
    names = ("transformer_engine.inner.c", "transformer_engine.other.b")
    result = dict.fromkeys(names, tmp_path / "other.py") | {
        "transformer_engine.inner.a": tmp_path / "a.py"
    }
    monkeypatch.setattr(source, "modules", lambda: result)
    assert imports("transformer_engine.inner.a") == [
        ("transformer_engine.inner.other.b", 2),
        ("transformer_engine.inner.c", 3),
    ]
    assert find_computed_imports("transformer_engine.inner.a") == [4]


def _below(*packages: str) -> list[str]:
    return [name for name in modules() if name.startswith(packages)]


def test_the_common_layer_imports_no_framework():
    """At module level: a function that builds a kernel may import Triton's language, no framework."""
    for name in _below("transformer_engine.common"):
        for node in tree(modules()[name]).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {n.split(".")[0] for n in names} & {"torch", "jax"}, name


def _top_level_names(name: str) -> set[str]:
    """Third-party packages that any import statement in a module names, also inside functions."""
    results: set[str] = set()
    for node in nodes(modules()[name]):
        if isinstance(node, ast.Import):
            results |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            results.add((node.module or "").split(".")[0])
    return results


def test_the_jax_side_does_not_import_pytorch():
    for name in _below("transformer_engine.jax"):
        assert not any(
            target.startswith("transformer_engine.pytorch") for target, _ in imports(name)
        ), name
        assert "torch" not in _top_level_names(name), name


def test_the_pytorch_side_does_not_import_jax():
    for name in _below("transformer_engine.pytorch"):
        assert not any(
            target.startswith("transformer_engine.jax") for target, _ in imports(name)
        ), name
        assert not _top_level_names(name) & {"jax", "flax"}, name


def files_imported() -> dict[str, set[str]]:
    """{module: modules from this package in its import statements}."""
    return {
        name: {target for target, _ in imports(name) if target in modules() and target != name}
        for name in modules()
    }


def test_no_files_import_each_other_in_a_circle():
    remaining = [sorted(circle) for circle in circles(files_imported())]
    assert not remaining, f"these import each other: {remaining}"


def test_no_module_is_loaded_while_it_waits_for_another_to_load():
    """A circular import works or fails depending on which of its modules a program imports first."""
    remaining = [
        sorted(circle)
        for circle in circles({name: find_loaded_modules(name) for name in modules()})
    ]
    assert not remaining, f"these load each other: {remaining}"


def test_loading_a_module_loads_its_imports_packages(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from transformer_engine.types import T\n"
        "try:\n    from transformer_engine.outer.inner import b, name\nexcept ImportError:\n    pass\n"
        "def f():\n    import transformer_engine.late\n"
    )
    rest = (
        "transformer_engine.outer",
        "transformer_engine.outer.inner",
        "transformer_engine.outer.inner.b",
    )
    names = ("transformer_engine", "transformer_engine.types", "transformer_engine.late", *rest)
    result = dict.fromkeys(names, tmp_path / "__init__.py") | {
        "transformer_engine.a": tmp_path / "a.py"
    }
    monkeypatch.setattr(source, "modules", lambda: result)
    assert find_loaded_modules("transformer_engine.a") == set(rest)


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"a"}}, [{"a", "b"}]),
        (
            {"a": {"b", "d"}, "b": {"c"}, "c": {"a"}, "d": {"e"}, "e": {"d"}},
            [{"d", "e"}, {"a", "b", "c"}],
        ),
        ({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}, []),
    ],
)
def test_import_circles_of_any_size_are_found(graph, expected):
    assert circles(graph) == expected


def test_type_checking_imports_and_own_package_imports_count(tmp_path, monkeypatch):
    (tmp_path / "__init__.py").write_text("from transformer_engine.inner import b\n")
    (tmp_path / "a.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .b import B\ndef f():\n    from . import name\n"
    )
    (tmp_path / "b.py").write_text("")
    results = {
        "transformer_engine.inner": tmp_path / "__init__.py",
        "transformer_engine.inner.a": tmp_path / "a.py",
        "transformer_engine.inner.b": tmp_path / "b.py",
    }
    monkeypatch.setattr(source, "modules", lambda: results)
    assert imports("transformer_engine.inner") == [("transformer_engine.inner.b", 1)]
    assert sorted(imports("transformer_engine.inner.a")) == [
        ("transformer_engine.inner", 5),
        ("transformer_engine.inner.b", 3),
    ]
