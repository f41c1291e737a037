"""Operations that are called as modules, because fusion would skip their hooks, `compile()` or a replaced `forward`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.nn.modules import module as every_module

from ..runtime.checks import MODULE_HOOKS


def are_unintercepted(operations: Sequence[Any]) -> bool:
    """Whether operation calls run no hook, no `compile()` graph and no replaced `forward`, in any part.

    It runs in each chain call: loops, because a generator would enter a function for each operation.
    """
    if (
        every_module._global_forward_hooks
        or every_module._global_forward_pre_hooks
        or every_module._global_backward_hooks
        or every_module._global_backward_pre_hooks
    ):
        return False
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
            or part._compiled_call_impl is not None
            or "forward" in part.__dict__
            or type(part).forward is not type(part)._own_forward
        ):
            return False
    return True


def unfused_reason(operation: Any) -> str | None:
    """Reason why an operation is called as a module, for `te.explain`; None if it fuses."""
    if are_unintercepted([operation]):
        return None
    parts = [operation, *(operation.basic_operations() if operation.is_fused_op else ())]
    for part in parts:
        name = "it" if part is operation else f"its {type(part).__name__}"
        for attribute in MODULE_HOOKS:
            if getattr(part, attribute):
                return f"{name} has {attribute[1:].replace('pre_', 'pre-').replace('_', ' ')}"
        if part._compiled_call_impl is not None:
            return f"{name} is compiled"
        if "forward" in part.__dict__:
            return f"the forward method of {'the operation' if part is operation else name} was replaced"
        if type(part).forward is not type(part)._own_forward:
            return f"the class of {'the operation' if part is operation else name} overrides forward"
    return "hooks are registered for all modules"
