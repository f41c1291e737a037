"""Names that other libraries replace: module functions, methods in module classes, and nn.Module calls.

Tools for fake quantization and for batch-invariant results replace NVIDIA's private functions by assigning to
its modules. A layer reads `replaced.names` in every call; if the set is not empty, it calls the replaced names.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as everywhere


class Replaced:
    """Replaced names in a file.

    Attributes:
        names: Names whose present value differs from the value at import.
    """

    def __init__(self, originals: Mapping[str, Any]) -> None:
        self._originals = originals
        self.names: set[str] = set()

    def assigned(self, name: str, value: Any) -> None:
        if name in self._originals:
            (self.names.discard if value is self._originals[name] else self.names.add)(name)


class _File(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.__dict__["_replaced"].assigned(name, value)


def watched(file: str, originals: Mapping[str, Any]) -> Replaced:
    """Return the record for a file's names, which the file stores as `_replaced`; classes may be changed as well."""
    module = sys.modules[file]
    replaced = Replaced(originals)
    for kind in originals.values():
        if isinstance(kind, ReplaceableFunction):
            kind.watchers.append(replaced)
    module.__class__ = _File
    return replaced


class ReplaceableFunction(type(torch.autograd.Function)):
    """Metaclass for autograd functions whose apply, forward or backward can be replaced."""

    watchers: list[Replaced]

    def __init__(cls, name: str, bases: tuple[type, ...], attributes: dict[str, Any]) -> None:
        super().__init__(name, bases, attributes)
        originals = {step: getattr(cls, step) for step in ("apply", "forward", "backward")}
        type.__setattr__(cls, "watchers", [])
        type.__setattr__(cls, "_steps", Replaced(originals))

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name not in ("apply", "forward", "backward"):
            return
        steps: Replaced = cls.__dict__["_steps"]
        # Every access to a bound method creates a new object.
        original = steps._originals[name]
        steps.assigned(name, original if value == original else value)
        for replaced in cls.watchers:
            (replaced.names.add if steps.names else replaced.names.discard)(
                f"{cls.__name__}.{name}"
            )


# Runs the hooks and `forward`. Tracers such as torch.fx replace it in torch.nn.Module.
MODULE_CALL: Any = nn.Module.__call__


def is_unintercepted(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether module(x) is the `forward` that its class `kind` defines, and nothing else; also not in torch.jit.

    A layer may then call another method of its child, such as `forward_with_residual`, or leave the call out.
    """
    return (
        type(module) is kind
        and kind.__call__ is MODULE_CALL
        and not any_intercepted((module,), "_layer_forward")
        and not torch._C._get_tracing_state()
    )


def any_intercepted(modules: Sequence[Any], own_forward: str = "_own_forward") -> bool:
    """Whether a call of any of the modules runs a hook, a `compile()` graph or a replaced method.

    The function runs in each layer call and each chain call: a loop, because a generator would enter a function for
    each module.

    Args:
        modules: Layers, or operations with the basic operations of fused ones.
        own_forward: Class attribute with the `forward` that the class defines: `_layer_forward` of layers,
            `_own_forward` of operations. A layer in the place of a basic operation intercepts its calls.
    """
    if everywhere._has_any_global_hook() or nn.Module.__call__ is not MODULE_CALL:
        return True
    for module in modules:
        if (
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
            or module._compiled_call_impl is not None
            or "forward" in module.__dict__
            or type(module).forward is not getattr(type(module), own_forward, None)
        ):
            return True
    return False
