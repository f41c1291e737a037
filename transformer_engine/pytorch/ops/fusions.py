"""Fusion functions: registered functions that replace consecutive operations of a chain by `FusedOperation`s.

A `FusedOperation` that a user wrote runs by its own methods. The `FusedOperation`s of this package do not change the
computation (`fused/operations.py`). They name the fused operations for tests and other libraries.

`OperationFuser` owns the lists of registered functions. It is `FusibleOperation._fuser` here, because fuser.py imports
this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ...common.numbers import with_article
from ...common.recipe import DelayedScaling, Recipe
from .operation import BasicOperation, FusibleOperation

# Fusion function: function(ops, recipe=recipe) -> ops.
FusionFunction = Callable[..., list[FusibleOperation]]
# Lists of functions for both passes, for forward passes, and for backward passes.
FusionLists = tuple[list[FusionFunction], list[FusionFunction], list[FusionFunction]]
# Operations in order, each with the indices that its basic operations have in the chain.
IndexedOperations = list[tuple[FusibleOperation, list[int]]]


def register_forward_fusion(op_fusion_func: FusionFunction, prepend: bool = False) -> None:
    """Register a function that replaces operations by fused ones in forward passes.

    Args:
        op_fusion_func: function(ops, recipe=recipe) -> ops. It receives and returns a list of operations in
            order. A new `FusedOperation` must consist of exactly the basic operations that it replaces.
        prepend: Apply the function before those registered earlier.

    Raises:
        TypeError: The function is not callable.
    """
    _register(FusibleOperation._fuser.forward_fusion_functions, op_fusion_func, prepend)


def register_backward_fusion(op_fusion_func: FusionFunction, prepend: bool = False) -> None:
    """Register a function that replaces operations by fused ones in backward passes.

    Args:
        op_fusion_func: See `register_forward_fusion`.
        prepend: Apply the function before those registered earlier.
    """
    _register(FusibleOperation._fuser.backward_fusion_functions, op_fusion_func, prepend)


def register_forward_backward_fusion(op_fusion_func: FusionFunction, prepend: bool = False) -> None:
    """Register a function that replaces operations by fused ones in both passes.

    Functions for both passes are applied before functions for one pass.

    Args:
        op_fusion_func: See `register_forward_fusion`.
        prepend: Apply the function before those registered earlier.
    """
    _register(FusibleOperation._fuser.forward_backward_fusion_functions, op_fusion_func, prepend)


def _register(functions: list[FusionFunction], function: FusionFunction, prepend: bool) -> None:
    if not callable(function):
        raise TypeError(
            f"{function!r} is not callable; give a function(ops, recipe=recipe) that returns operations"
        )
    functions.insert(0 if prepend else len(functions), function)


class FusionResults(NamedTuple):
    """Results from the registered fusion functions.

    Attributes:
        forward: Operations in the forward pass.
        backward: Operations in the backward pass.
        first_with_backward: Index of the first basic operation that the backward pass reaches.
        recipe_type: Recipe class; None without a recipe.
        key: Everything else that the fusion functions depend on.
    """

    forward: IndexedOperations
    backward: IndexedOperations
    first_with_backward: int
    recipe_type: type[Recipe] | None
    key: Any


def fuse_operations(
    basic_ops: Sequence[BasicOperation],
    functions: FusionLists,
    first_with_backward: int,
    recipe: Recipe | None,
    previous: FusionResults,
) -> FusionResults:
    """Apply fusion functions to a chain, or return the previous results if nothing has changed.

    The previous results are returned if the functions, `first_with_backward`, and three properties of the recipe are
    equal: its class, `amax_history_len` and `backward_override`. A change of another recipe field does not call the
    functions again.

    Args:
        basic_ops: The basic operations of the chain.
        functions: Copies of the registered functions.
        first_with_backward: Index of the first basic operation that the backward pass reaches.
        recipe: The active recipe; None without one.
        previous: Results for an earlier call.
    """
    recipe_type = None if recipe is None else type(recipe)
    length = recipe.amax_history_len if isinstance(recipe, DelayedScaling) else None
    key = (length, getattr(recipe, "backward_override", None), first_with_backward, *functions)
    # torch 2.11 can trace `is` between classes, but not == on tuples that contain classes.
    if recipe_type is previous.recipe_type and key == previous.key:
        return previous
    both_functions, forward_functions, backward_functions = functions
    both = _apply_functions(both_functions, basic_ops, basic_ops, recipe)
    return FusionResults(
        forward=_with_indices(_apply_functions(forward_functions, both, basic_ops, recipe)),
        backward=_with_indices(_apply_functions(backward_functions, both, basic_ops, recipe)),
        first_with_backward=first_with_backward,
        recipe_type=recipe_type,
        key=key,
    )


def _apply_functions(
    functions: Sequence[FusionFunction],
    ops: Sequence[FusibleOperation],
    basic_ops: Sequence[BasicOperation],
    recipe: Recipe | None,
) -> list[FusibleOperation]:
    """Apply fusion functions one after another.

    Args:
        functions: The functions.
        ops: The operations that the first function receives.
        basic_ops: The basic operations that every result must cover once each, in this order.
        recipe: The active recipe; None without one.

    Raises:
        TypeError: A function did not return an operation sequence.
        RuntimeError: The operations do not cover the basic operations.
    """
    ops = list(ops)
    for function in functions:
        ops = _check_operations(function, function(ops, recipe=recipe))
    covered = [basic for op in ops for basic in op.basic_operations()]
    covers_all = len(covered) == len(basic_ops) and all(
        op is basic for op, basic in zip(covered, basic_ops, strict=True)
    )
    if not covers_all:
        raise RuntimeError(
            f"mismatch after fusing: the operations {[type(op).__name__ for op in ops]} do not cover the basic "
            f"operations {[type(op).__name__ for op in basic_ops]} once each in their order; a fusion function must "
            "replace operations by FusedOperations of exactly these operations"
        )
    return ops


def _check_operations(function: Any, returned: Any) -> list[FusibleOperation]:
    """Operations that a fusion function returned.

    Raises:
        TypeError: The return value is not an operation sequence.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if not isinstance(returned, Iterable):
        raise TypeError(
            f"the fusion function {name} returned {with_article(type(returned))}; return the list of operations"
        )
    ops = list(returned)
    for op in ops:
        if not isinstance(op, FusibleOperation):
            raise TypeError(
                f"the fusion function {name} returned {with_article(type(op))} in its list; return FusibleOperations"
            )
    return ops


def _with_indices(ops: Sequence[FusibleOperation]) -> IndexedOperations:
    """Pair each operation with the indices that its basic operations have in the chain."""
    indexed: IndexedOperations = []
    offset = 0
    for op in ops:
        count = len(op.basic_operations())
        indexed.append((op, list(range(offset, offset + count))))
        offset += count
    return indexed
