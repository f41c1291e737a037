"""Operations that are called as modules, because fusion would skip their hooks, `compile()`, or a replaced method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...common.numbers import with_article
from ..compat.replaceable import MODULE_CALL, any_intercepted
from ..runtime.checks import MODULE_HOOKS


def list_interceptable(operations: Sequence[Any]) -> list[Any]:
    """Operations, and the basic operations of the fused ones or the modules that replace them."""
    parts = list(operations)
    for operation in operations:
        if getattr(operation, "is_fused_op", False):
            parts += operation.basic_operations()
    return parts


def unfused_reason(operation: Any) -> str | None:
    """Reason why an operation is called as a module, for `te.explain`; None if it fuses."""
    parts = list_interceptable([operation])
    if not any_intercepted(parts):
        return None
    for part in parts:
        name = "it" if part is operation else f"its {type(part).__name__}"
        if not hasattr(type(part), "_own_forward"):
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
            return (
                f"the class of {'the operation' if part is operation else name} overrides forward"
            )
    return "hooks are registered for all modules"
