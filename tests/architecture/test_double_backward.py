"""No autograd function is differentiated twice silently: it raises with its name, or is proven correct."""

from __future__ import annotations

import ast

from tests.architecture.source import modules, nodes

# Functions whose backward autograd may record; tests/module/test_double_backward.py compares each with float64.
TWICE = {
    "attention.mla_projection._QuantizeQuery",  # the codes' gradient is the query's gradient
    "functions.attention.autograd._CoreAttention",
    "functions.attention.autograd._ProjectedAttention",
    "attention.rope.ApplyPackedRope",
    "attention.rope.ApplyRope",
    "attention.rope.FusedQKVRoPEFunc",  # by the backward of ApplyPackedRope
    "attention.rope.FusedRoPEFunc",  # by that of ApplyRope
    "runtime.autograd._Product",
    "runtime.float32_products._UnroundedProduct",  # tests/primitives/test_float32_products.py
    "runtime.float32_products._UnroundedSolution",
    "runtime.double_backward._LinearMap",
    "runtime.double_backward._FirstDerivativeOnly",  # it raises the error
    "functions.activation._Activation",
    "functions.attention.context_parallel.all_to_all._Exchange",
    "functions.dropout._BiasAdd",
    "functions.dropout._BiasDropoutAdd",
    "functions.dropout._Dropout",
    "functions.norm._Normalize",
    "functions.pieces._JoinPieces",
    "functions.softmax._ScaledSoftmax",
    "functions.split_heads.SplitAlongDim",
    "functions.split_heads._SplitHeads",
    "tensor.construction.StraightThroughDequantize",
    "tensor.construction.StraightThroughQuantize",
}
ROOT = "transformer_engine.pytorch."
BASES = {"runtime.autograd.Function", "runtime.autograd.TorchFunction"}  # they have no passes


def autograd_functions() -> dict[str, ast.FunctionDef]:
    """{dotted name without the root: its backward} for every class that derives from an autograd Function."""
    results = {}
    for name, path in modules().items():
        for node in nodes(path):
            if not isinstance(node, ast.ClassDef):
                continue
            function = f"{name}.{node.name}".removeprefix(ROOT)
            bases = {ast.unparse(base).split(".")[-1] for base in node.bases}
            if bases & {"Function", "TorchFunction"} and function not in BASES:
                methods = {m.name: m for m in node.body if isinstance(m, ast.FunctionDef)}
                results[function] = methods["backward"]
    return results


def rejects(backward: ast.FunctionDef) -> bool:
    decorators = ("once_differentiable(",)
    return any(ast.unparse(d).startswith(decorators) for d in backward.decorator_list)


def test_every_autograd_function_rejects_a_second_derivative_or_has_one():
    functions = autograd_functions()
    assert len(functions) > len(TWICE)
    assert {name for name, backward in functions.items() if not rejects(backward)} == TWICE


def test_rejecting_decorators_are_found_inside_staticmethod():
    """The other way round autograd would call the guard with the descriptor."""
    for name, backward in autograd_functions().items():
        if rejects(backward):
            assert ast.unparse(backward.decorator_list[0]) == "staticmethod", name
