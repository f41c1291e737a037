"""A tensor is created on an explicit device: callers set a default device, and ours are not theirs."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.source import modules, nodes

# torch's functions that create a tensor from numbers alone, on the default device.
MAKERS = {
    "arange",
    "as_tensor",
    "asarray",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "scalar_tensor",
    "tensor",
    "zeros",
}


def nowhere(tree_nodes) -> list[int]:
    """Lines with calls torch.MAKER(..) without a device."""
    return [
        node.lineno
        for node in tree_nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in MAKERS
        and not {"device", None} & {keyword.arg for keyword in node.keywords}
    ]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("torch.zeros(3)", [1]),
        ("torch.zeros(3, device=x.device)", []),
        ("torch.empty(3, **place)", []),
        ("x.new_zeros(3)", []),
    ],
)
def test_a_creation_without_a_device_is_found(call, expected):
    assert nowhere(ast.walk(ast.parse(call))) == expected


def test_every_tensor_is_created_on_an_explicit_device():
    loose = {name: lines for name in modules() if (lines := nowhere(nodes(modules()[name])))}
    assert not loose
