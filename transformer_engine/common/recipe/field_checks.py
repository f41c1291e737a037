"""Defaults, conversion and validation for recipe fields; every error names the recipe's class and the field.

Defaults come from environment variables, which are read once, when this module is imported. A value that cannot be read
does not fail the import: the first recipe that is constructed raises the error.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from typing import Any

from .. import env
from ..numbers import described, with_article

Converter = Callable[[str, Any], Any]

_unreadable: list[str] = []


def default_value(name: str) -> Any:
    """The variable's value, or the table's default for a value that `demand_readable_defaults` rejects."""
    try:
        return env.get(name)
    except ValueError as error:
        _unreadable.append(str(error))
        return env.variable(name).default


def demand_readable_defaults() -> None:
    """Raise ValueError for the first variable whose value could not be read at import."""
    if _unreadable:
        raise ValueError(_unreadable[0])


def defaults_are_readable() -> bool:
    """Whether every variable had a valid value at import."""
    return not _unreadable


def convert_fields(record: Any, converters: Mapping[str, Converter]) -> None:
    """Convert the fields of a dataclass in place by their declared types; other types are left unchanged."""
    for name, declared in _declare_fields(type(record)):
        value = record.__dict__.get(name)
        if isinstance(value, str) and declared.startswith("str"):
            # for example a str enumeration member
            object.__setattr__(record, name, str.__str__(value))
        elif declared in converters and name in record.__dict__:
            converted = converters[declared](f"{type(record).__name__}: {name}", value)
            if converted is not value:
                object.__setattr__(record, name, converted)


@functools.cache
def _declare_fields(kind: type) -> tuple[tuple[str, str], ...]:
    """Names and types of the fields in the nearest `recipe_class`; a user's subclass may declare others."""
    declaring = next((base for base in kind.__mro__ if "_is_recipe_class" in vars(base)), kind)
    return tuple((f.name, str(f.type)) for f in fields(declaring))


def member_of_value(kind: type[Enum]) -> Converter:
    """Build a converter from the value of a member, such as (448, 57344), to the member."""

    def convert(name: str, value: Any) -> Any:
        member_value = tuple(value) if isinstance(value, Sequence) else value
        return next((member for member in kind if member.value == member_value), value)

    return convert


def instance_of_fields(kind: type) -> Converter:
    """Build a converter from a field dict to a dataclass instance; unknown fields warn."""
    names = frozenset(f.name for f in fields(kind))

    def convert(name: str, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        if unknown := [str(key) for key in value if key not in names]:
            warnings.warn(
                f"{name} ignores unknown fields: {', '.join(unknown)}", UserWarning, stacklevel=8
            )
        return kind(**{key: item for key, item in value.items() if key in names})

    return convert


def check_minimum(recipe: Any, name: str, least: int) -> None:
    """Raise ValueError for a whole number below `least`."""
    value = getattr(recipe, name)
    if value < least:
        raise ValueError(
            f"{type(recipe).__name__}: {name}={value} is below {least}; give a whole number of at least {least}"
        )


def require(recipe: Any, name: str, allowed: tuple[Any, ...], remedy: str = "") -> None:
    """Raise ValueError unless the field has an allowed value."""
    value = getattr(recipe, name)
    if not any(isinstance(value, type(choice)) and value == choice for choice in allowed):
        choices = " or ".join(repr(a) for a in allowed)
        advice = f"; {remedy}" if remedy else ""
        raise ValueError(f"{type(recipe).__name__}: {name}={value!r}; it must be {choices}{advice}")


def require_kind(recipe: Any, kind: type, *names: str) -> None:
    """Raise TypeError unless the fields, where they are set, are instances of one class."""
    for name in names:
        value = getattr(recipe, name, None)
        if hasattr(recipe, name) and not isinstance(value, kind):
            raise TypeError(
                f"{type(recipe).__name__}: {name}={described(value)} is {with_article(type(value))}; "
                f"give {kind.__name__}(..)"
            )


def require_fp8(recipe: Any, formats: tuple[Any, ...]) -> None:
    """Raise ValueError unless format and override are valid in an FP8 recipe."""
    require(recipe, "fp8_format", formats, "gradients alone may use E5M2, by HYBRID")
    require(recipe, "backward_override", (None, "high_precision", "dequantized"))
