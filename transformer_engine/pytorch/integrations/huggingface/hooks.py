"""Hooks of modules, found again by what they are: handles do not survive a copy of the module."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any


def drop_hooks(hooks: MutableMapping[int, Any], is_ours: Callable[[Any], bool]) -> list[int]:
    """Take those that are ours out of a module's hooks; their numbers."""
    numbers = [number for number, hook in hooks.items() if is_ours(hook)]
    for number in numbers:
        del hooks[number]
    return numbers
