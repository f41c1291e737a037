"""Operations that are called as modules, because fusion would skip their hooks or a replaced `forward`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def is_bare(operation: Any) -> bool:
    """Return whether a call of an operation runs neither hooks nor a `forward` that was replaced, in no part of it."""
    return all(
        not (
            op._forward_hooks
            or op._forward_pre_hooks
            or op._backward_hooks
            or op._backward_pre_hooks
            or "forward" in op.__dict__
            or type(op).forward is not type(op)._own_forward
        )
        for op in (operation, *operation.basic_operations())
    )


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
