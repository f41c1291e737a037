"""Kernels add in a fixed order; other kernels' backends declare that their results vary."""

from __future__ import annotations

import ast

from tests.architecture.source import modules, nodes
from transformer_engine.common import dispatch

# Atomics whose result does not depend on the arrival order.
IN_ANY_ORDER = {"atomic_max", "atomic_min", "atomic_or", "atomic_and"}
# Kernels that add whole numbers alone, which are the same in any order.
COUNTING = {"transformer_engine.common.kernels.router_margins"}
# {kernel file: (operation, backend) in the row that declares `varies`}
VARYING: dict[str, tuple[str, str]] = {}
KERNELS = [name for name in modules() if name.startswith("transformer_engine.common.kernels.")]


def atomics(name: str) -> set[str]:
    return {
        node.attr
        for node in nodes(modules()[name])
        if isinstance(node, ast.Attribute) and node.attr.startswith("atomic_")
    }


def find_unordered_atomics(name: str) -> set[str]:
    return atomics(name) - IN_ANY_ORDER - ({"atomic_add"} if name in COUNTING else set())


def test_a_kernel_adds_in_a_fixed_order_or_its_backend_declares_it():
    import transformer_engine.pytorch  # noqa: F401 - registers the tables

    unordered = {name: result for name in KERNELS if (result := find_unordered_atomics(name))}
    assert unordered.keys() == VARYING.keys(), (
        "a row of VARYING for each kernel without a fixed order"
    )
    silent = {
        name: unordered[name]
        for name, (operation, backend) in VARYING.items()
        if dispatch.tables[operation].named(backend).varies is None
    }
    assert not silent
