"""Operations that are called as modules, because fusion would skip their hooks, `compile()`, or a replaced method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...common.numbers import with_article
from ..compat.replaceable import MODULE_CALL, are_unintercepted
from ..runtime.checks import MODULE_HOOKS


def with_basic_operations(operations: Sequence[Any]) -> list[Any]:
    """Operations, and the basic operations of the fused ones or the modules that replace them."""
    parts = list(operations)
    for operation in operations:
        if getattr(operation, "is_fused_op", False):
            parts += operation.basic_operations()
    return parts


def may_fuse(operation: Any) -> bool:
    """Whether nothing intercepts calls of an operation and of its basic operations.

    A module that replaces a basic operation, such as a wrapper around it, intercepts its calls.
    """
    parts = with_basic_operations([operation])
    return all(hasattr(part, "is_fused_op") for part in parts) and are_unintercepted(parts)


def unfused_reason(operation: Any) -> str | None:
    """Reason why an operation is called as a module, for `te.explain`; None if it fuses."""
    if may_fuse(operation):
        return None
    for part in with_basic_operations([operation]):
        name = "it" if part is operation else f"its {type(part).__name__}"
        if not hasattr(part, "is_fused_op"):
            return f"{with_article(type(part))} replaces one of its operations"
        if type(part).__call__ is not MODULE_CALL:
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
