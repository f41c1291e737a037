"""Imports go down only: a module may import its own layer and those below."""

from __future__ import annotations

import ast

import pytest
from source import imports, is_package, modules, tree

# The longest prefix decides. Layers as in docs/architecture.md.
LAYERS = {
    "transformer_engine": 9,
    "transformer_engine._version": 0,
    "transformer_engine.common": 0,
    "transformer_engine.pytorch": 8,  # the package's __init__ gathers the public names of all layers
    "transformer_engine.pytorch.device": 1,
    "transformer_engine.pytorch.device_checks": 1,
    "transformer_engine.pytorch.constants": 1,
    "transformer_engine.pytorch.backward_thread": 1,
    "transformer_engine.pytorch.tracing": 1,
    "transformer_engine.pytorch.double_backward": 1,
    "transformer_engine.pytorch.primitives": 1,
    "transformer_engine.pytorch.tensor": 2,
    "transformer_engine.pytorch.quantization": 3,
    "transformer_engine.pytorch.distributed": 4,
    "transformer_engine.pytorch.functions": 5,
    "transformer_engine.pytorch.module": 6,
    "transformer_engine.pytorch.attention": 6,
    "transformer_engine.pytorch.transformer": 6,
    "transformer_engine.pytorch.explain": 7,
    "transformer_engine.pytorch.memory_ledger": 7,
    "transformer_engine.pytorch.memory_plan": 7,
    "transformer_engine.pytorch.planned_backends": 7,
    "transformer_engine.pytorch.reduction_scratch": 7,
    "transformer_engine.pytorch.autotune": 7,
    "transformer_engine.cli": 8,
    "transformer_engine_torch": 8,
}


def layer(name: str) -> int:
    while name not in LAYERS:
        name = name.rpartition(".")[0]
    return LAYERS[name]


@pytest.mark.parametrize("name", modules())
def test_a_module_imports_nothing_above_its_layer(name):
    for target, line in imports(name):
        assert layer(target) <= layer(name), (
            f"{name}:{line} (layer {layer(name)}) imports {target} ({layer(target)})"
        )


@pytest.mark.parametrize("name", [n for n in modules() if n.startswith("transformer_engine.common")])
def test_the_common_layer_imports_no_framework(name):
    for node in tree(modules()[name]).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not {n.split(".")[0] for n in names} & {"torch", "jax"}, name


def test_modules_import_each_other_in_no_cycle():
    graph = {name: {target for target, _ in imports(name)} for name in modules()}
    # A package's __init__ is entered before its members, so the edge from a member to its own package is no import.
    graph = {
        name: {t for t in targets if not (is_package(t) and name.startswith(t + "."))}
        for name, targets in graph.items()
    }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name in done:
            return
        for target in sorted(graph[name]):
            visit(target, (*path, name))
        done.add(name)

    for name in graph:
        visit(name, ())
