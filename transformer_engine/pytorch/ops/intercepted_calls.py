"""Operations that are called as modules, because fusion would skip their hooks, `compile()`, or a replaced method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules import module as every_module

from ...common.numbers import with_article
from ..runtime.checks import MODULE_HOOKS

# Runs the hooks and `forward`. Tracers such as torch.fx replace it in torch.nn.Module.
_MODULE_CALL = torch.nn.Module.__call__


def with_basic_operations(operations: Sequence[Any]) -> list[Any]:
    """Operations, and the basic operations of the fused ones or the modules that replace them."""
    parts = list(operations)
    for operation in operations:
        if getattr(operation, "is_fused_op", False):
            parts += operation.basic_operations()
    return parts


def are_unintercepted(operations: Sequence[Any]) -> bool:
    """Whether calls of operations run no hook, no `compile()` graph and no replaced method.

    A module that replaces a basic operation of a fused one, such as a wrapper around it, intercepts its calls. The
    function runs in each chain call: a loop, because a generator would enter a function for each operation.

    Args:
        operations: Operations, with the basic operations of fused ones (`with_basic_operations`).
    """
    if (
        every_module._global_forward_hooks
        or every_module._global_forward_pre_hooks
        or every_module._global_backward_hooks
        or every_module._global_backward_pre_hooks
        or torch.nn.Module.__call__ is not _MODULE_CALL
    ):
        return False
    for operation in operations:
        if (
            operation._forward_hooks
            or operation._forward_pre_hooks
            or operation._backward_hooks
            or operation._backward_pre_hooks
            or operation._compiled_call_impl is not None
            or "forward" in operation.__dict__
            or type(operation).forward is not getattr(type(operation), "_own_forward", None)
        ):
            return False
    return True


def unfused_reason(operation: Any) -> str | None:
    """Reason why an operation is called as a module, for `te.explain`; None if it fuses."""
    parts = with_basic_operations([operation])
    if are_unintercepted(parts):
        return None
    for part in parts:
        name = "it" if part is operation else f"its {type(part).__name__}"
        if not hasattr(type(part), "_own_forward"):
            return f"{with_article(type(part))} replaces one of its operations"
        if type(part).__call__ is not _MODULE_CALL:
            return f"{type(part).__name__}.__call__ is not torch's own: a class or a tracer has replaced it"
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
