"""Attributes that children and parameters of a layer were made by, or work by: refused when changed, or handed down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


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


def is_made(module: torch.nn.Module) -> bool:
    """Has a layer got the children or parameters that its constructor makes?"""
    held = module.__dict__
    return bool(held.get("_modules") or held.get("_parameters"))


def refuse_if_made(module: torch.nn.Module, name: str, before: Any, value: Any) -> None:
    """AttributeError for another value of an attribute that a layer's children or parameters were made by."""
    if before != value and is_made(module):
        raise AttributeError(
            f"{name}={value!r}: this {type(module).__name__} was made with {name}={before!r}, which "
            f"decides what it consists of; make another one with {name}={value!r}"
        )
