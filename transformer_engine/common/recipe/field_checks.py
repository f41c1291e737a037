"""Checks on the fields of recipes, which name the recipe's class."""

from __future__ import annotations

from typing import Any

from ..checks import described, switch


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


def require_kind(recipe: Any, kind: type, *names: str) -> None:
    """TypeError unless the fields called names are of one class."""
    for name in names:
        value = getattr(recipe, name)
        if not isinstance(value, kind):
            raise TypeError(
                f"{type(recipe).__name__}: {name}={described(value)} is a {type(value).__name__}; "
                f"give {kind.__name__}(..)"
            )


def require_fp8(recipe: Any, formats: tuple[Any, ...]) -> None:
    """ValueError unless format and override are those of a recipe in FP8."""
    require(recipe, "fp8_format", formats, "gradients alone may use E5M2, by HYBRID")
    require(recipe, "backward_override", (None, "high_precision", "dequantized"))
