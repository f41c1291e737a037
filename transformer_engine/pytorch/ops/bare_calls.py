"""Operations that are called as modules, because fusion would skip their hooks or a replaced `forward`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def are_bare(operations: Sequence[Any]) -> bool:
    """Return whether calls of operations run neither hooks nor a `forward` that was replaced, in no part of them.

    It runs in each call of a chain: loops, because a generator would enter a function for each operation.
    """
    parts = list(operations)
    for operation in operations:
        if operation.is_fused_op:
            parts += operation.basic_operations()
    for part in parts:
        if (
            part._forward_hooks
            or part._forward_pre_hooks
            or part._backward_hooks
            or part._backward_pre_hooks
            or "forward" in part.__dict__
            or type(part).forward is not type(part)._own_forward
        ):
            return False
    return True


def call_one_by_one(operations: Sequence[Any], input: Tensor, extra_inputs: tuple[Tensor, ...]) -> Any:
    """Call basic operations as modules, in order.

    Returns:
        The output, or a tuple of the output and the extra outputs.
    """
    x: Any = input
    outputs: list[Tensor] = []
    at = 0
    for operation in operations:
        x = operation(x, *extra_inputs[at : at + operation.num_extra_inputs])
        at += operation.num_extra_inputs
        if isinstance(x, tuple):
            x, *extra = x
            outputs += extra
    return (x, *outputs) if outputs else x
