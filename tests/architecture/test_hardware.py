"""Code queries the hardware table by capability name; it compares no compute capabilities."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.source import modules, nodes

TABLE = "transformer_engine.common.hardware"
NAMES = {
    *("capability", "compute_capability", "get_device_compute_capability", "get_device_capability"),
    *("architecture", "gcnArchName", "likeness", "capability_number"),
}
# The getters split or encode the number or the name that a library reports.
GETTERS = ("transformer_engine.pytorch.runtime.device", "transformer_engine.jax.runtime.platform")
PARTS = {"major", "minor"}  # attributes among a device's properties
# Functions that return a row of the table. Code compares no rows either.
ROWS = {"nvidia", "hardware_named", "hardware_of_gpu"}


def _is_row(node: ast.expr) -> bool:
    """Whether an expression is a call that returns a row for an architecture."""
    function = node.func if isinstance(node, ast.Call) else None
    return (isinstance(function, ast.Name) and function.id in ROWS) or (
        isinstance(function, ast.Attribute) and function.attr in ROWS
    )


def _is_capability(node: ast.expr) -> bool:
    """Whether an expression is a compute capability or an architecture, a part of one, or a multiple."""
    if isinstance(node, ast.Call):
        return _is_capability(node.func)
    if isinstance(node, (ast.Subscript, ast.NamedExpr, ast.Starred)):
        return _is_capability(node.value)
    if isinstance(node, ast.BinOp):
        return _is_capability(node.left) or _is_capability(node.right)
    if isinstance(node, ast.Name):
        return node.id in NAMES
    if isinstance(node, (ast.Tuple, ast.List)):
        return any(map(_is_capability, node.elts))
    return isinstance(node, ast.Attribute) and (
        node.attr in NAMES | PARTS or _is_capability(node.value)
    )


def comparisons(tree_nodes) -> list[int]:
    """Lines that compare a compute capability, or unpack one to compare its parts."""
    lines = []
    for node in tree_nodes:
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
            if any(map(_is_row, parts)):
                lines.append(node.lineno)
                continue
            if all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
                continue
            if any(_is_capability(part) for part in parts):
                lines.append(node.lineno)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("startswith", "endswith") and _is_capability(node.func.value):
                lines.append(node.lineno)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            if _is_capability(node.value):
                lines.append(node.lineno)
    return lines


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("if request.capability < (9, 0): pass", [1]),
        ("if call.capability[0] != 9: pass", [1]),
        ("if (capability := compute_capability()) < 90: pass", [1]),
        ("if torch.cuda.get_device_capability() >= (8, 9): pass", [1]),
        ("major, minor = call.capability", [1]),
        ("if hardware.architecture == '9.0': pass", [1]),
        ("if hardware.architecture in ('8.0', '8.6'): pass", [1]),
        ("if hardware.architecture.startswith('12'): pass", [1]),
        ("if capability_number(hardware) >= 90: pass", [1]),
        ("if (properties.major, properties.minor) >= (9, 0): pass", [1]),
        ("if hardware is nvidia(9, 0): pass", [1]),
        ("if hardware is hardware_named('nvidia', '12.0'): pass", [1]),
        ("if request.hardware.has('fp8 products'): pass", []),
        ("if capability is None: pass", []),
        ("title = f'{request.capability}'", []),
    ],
)
def test_compute_capability_comparisons_are_found(code, expected):
    assert comparisons(ast.walk(ast.parse(code))) == expected


def test_only_the_hardware_table_compares_compute_capabilities():
    places = {name: comparisons(nodes(modules()[name])) for name in modules() if name != TABLE}
    for getter in GETTERS:
        places.pop(getter, None)
    assert {name: lines for name, lines in places.items() if lines} == {}
