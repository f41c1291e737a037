"""Attributes of a module that are changed after it was made: they take effect in its next call, or raise.

`names_read(cls)` says which attributes the code of a class reads, so that writing one of them can make the module
forget what it remembers of calls; `hand_down` writes an attribute of a layer to the children that work by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import CodeType
from typing import Any

import torch


def names_read(cls: type) -> frozenset[str]:
    """Public names that the functions written in the body of a class mention: those of attributes are among them."""
    found: set[str] = set()
    for member in vars(cls).values():
        for function in (member, getattr(member, "fget", None), getattr(member, "__func__", None)):
            code = getattr(function, "__code__", None)
            if code is not None:
                _collect(code, found)
    return frozenset(name for name in found if not name.startswith("_"))


def _collect(code: CodeType, found: set[str]) -> None:
    found.update(code.co_names)
    for constant in code.co_consts:  # functions within the function
        if isinstance(constant, CodeType):
            _collect(constant, found)


def hand_down(
    module: torch.nn.Module, name: str, value: Any, children: Mapping[str, tuple[str, ...]]
) -> None:
    """Set what children[name] lists, as "child.attribute", as well, once the children are there."""
    owned = module.__dict__.get("_modules") or {}
    for path in children.get(name, ()):
        child, attribute = path.split(".")
        found = owned.get(child)
        if found is not None:
            setattr(found, attribute, value)


def refuse_if_fixed(module: torch.nn.Module, name: str, value: Any, fixed: frozenset[str]) -> None:
    """AttributeError for another value of an attribute that the children of a layer were made by."""
    if name in fixed and module.__dict__.get("_modules") and module.__dict__.get(name, value) != value:
        raise AttributeError(
            f"{name}={value!r}: this {type(module).__name__} was made with {name}={module.__dict__[name]!r}, which "
            f"decides what it consists of; make another one with {name}={value!r}"
        )
