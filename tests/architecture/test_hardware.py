"""Code queries the table of hardware by the name of a capability; it compares no compute capabilities."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.source import modules, nodes

TABLE = "transformer_engine.common.hardware"
NAMES = {"capability", "compute_capability", "get_device_compute_capability", "get_device_capability"}


def _is_capability(node: ast.expr) -> bool:
    """Whether an expression is a compute capability, a part of one, or a multiple."""
    if isinstance(node, ast.Call):
        return _is_capability(node.func)
    if isinstance(node, (ast.Subscript, ast.NamedExpr, ast.Starred)):
        return _is_capability(node.value)
    if isinstance(node, ast.BinOp):
        return _is_capability(node.left) or _is_capability(node.right)
    if isinstance(node, ast.Name):
        return node.id in NAMES
    return isinstance(node, ast.Attribute) and node.attr in NAMES


def comparisons(tree_nodes) -> list[int]:
    """Lines that compare a compute capability, or unpack one to compare its parts."""
    lines = []
    for node in tree_nodes:
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
            if all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
                continue
            if any(_is_capability(part) for part in parts):
                lines.append(node.lineno)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            if _is_capability(node.value):
                lines.append(node.lineno)
    return lines


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("if request.capability < (9, 0): pass", [1]),
        ("if call.capability[0] != 9: pass", [1]),
        ("if (capability := compute_capability()) < 90: pass", [1]),
        ("if torch.cuda.get_device_capability() >= (8, 9): pass", [1]),
        ("major, minor = call.capability", [1]),
        ("if request.hardware.has('fp8 products'): pass", []),
        ("if capability is None: pass", []),
        ("title = f'{request.capability}'", []),
    ],
)
def test_a_comparison_of_compute_capabilities_is_seen(code, found):
    assert comparisons(ast.walk(ast.parse(code))) == found


def test_only_the_table_of_hardware_compares_compute_capabilities():
    places = {name: comparisons(nodes(modules()[name])) for name in modules() if name != TABLE}
    # The getters split or encode the number that a library reports.
    places.pop("transformer_engine.pytorch.runtime.device", None)
    assert {name: lines for name, lines in places.items() if lines} == {}
