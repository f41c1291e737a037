"""Checks on the fields of recipes, which name the recipe's class."""

from __future__ import annotations

from typing import Any

from ..checks import switch


def require(recipe: Any, name: str, allowed: tuple[Any, ...], remedy: str = "") -> None:
    """ValueError unless the field has one of the allowed values."""
    value = getattr(recipe, name)
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        choices = " or ".join(repr(a) for a in allowed)
        advice = f"; {remedy}" if remedy else ""
        raise ValueError(f"{type(recipe).__name__}: {name}={value!r}; it must be {choices}{advice}")


def require_switches(recipe: Any, *names: str) -> None:
    """TypeError unless fp8_dpa, fp8_mha and the fields called names are True or False."""
    for name in ("fp8_dpa", "fp8_mha", *names):
        switch(f"{type(recipe).__name__}: {name}", getattr(recipe, name))
