"""Checks of single values: each raises an error with the argument's name, the value, the limit and the remedy.

A value of the wrong type raises TypeError, a value outside its limits ValueError. The functions of this module leave
the value unchanged and do not accept a bool, a float or an array as a whole number; `numbers` converts values from
every form that callers use.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from numbers import Integral, Real
from typing import Any

from .numbers import described as described
from .numbers import to_bool


def reject_keywords(function: str, given: Collection[str], renamed: Mapping[str, str]) -> None:
    """Raise TypeError for unknown keywords; the message gives the present name of a renamed keyword."""
    for name in given:
        remedy = f"use {renamed[name]}=" if name in renamed else "leave it out"
        raise TypeError(f"{function}() takes no {name}=; {remedy}")


def whole(name: str, value: Any, least: int = 1) -> None:
    """Raise an error unless value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={described(value)} must be a whole number; give an int of at least {least}")
    if value < least:
        raise ValueError(f"{name}={value} is below {least}; give a whole number of at least {least}")


def whole_or_none(name: str, value: Any, least: int = 1) -> None:
    """None, or a whole number of at least `least`."""
    if value is not None:
        whole(name, value, least)


def integer(name: str, value: Any) -> None:
    """Any whole number, negative ones included."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={described(value)} must be a whole number; give an int")


def number(name: str, value: Any) -> None:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={described(value)} must be a number; give a float")
    # Compared, as a tracer's symbol can be, which isfinite does not take.
    if not -math.inf < value < math.inf:  # pyright: ignore[reportOperatorIssue]
        raise ValueError(f"{name}={value} is not finite; give a finite number")


def number_or_none(name: str, value: Any) -> None:
    """None, or a finite number."""
    if value is not None:
        number(name, value)


def epsilon(name: str, value: Any) -> None:
    """A finite number >= 0, which is added where a division by zero could be."""
    number(name, value)
    if value < 0:
        raise ValueError(f"{name}={value} is below 0; give a small number such as 1e-5, or 0")


def positive(name: str, value: Any) -> None:
    """A finite number > 0."""
    number(name, value)
    if value <= 0:
        raise ValueError(f"{name}={value} must be above 0; give a positive number")


def exponent(name: str, value: Any) -> None:
    """A number whose power of two is a normal float32, which a scale is divided by."""
    number(name, value)
    if not -126 <= value <= 127:
        raise ValueError(f"{name}={value}: 2^{value} is no normal float32; give a number from -126 to 127")


def drop_rate(name: str, value: Any) -> None:
    """The share of elements to drop, in [0, 1): who drops all divides by zero."""
    number(name, value)
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name}={value} is outside [0, 1); give the share of elements to drop")


def switch(name: str, value: Any) -> None:
    """Raise TypeError for a value without a truth value; `numbers.to_bool` converts all others."""
    if value is not True and value is not False and value is not None:
        to_bool(name, value)


def text_or_none(name: str, value: Any) -> None:
    """None, or a str."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name}={described(value)} must be a str; give a name, or None")


def function(name: str, value: Any) -> None:
    """Something that can be called."""
    if not callable(value):
        raise TypeError(f"{name}={described(value)} cannot be called; give a function")


def function_or_none(name: str, value: Any) -> None:
    """None, or something that can be called."""
    if value is not None and not callable(value):
        raise TypeError(f"{name}={described(value)} cannot be called; give a function, or None")


def one_of(name: str, value: Any, allowed: Collection[Any]) -> None:
    """Raise ValueError for a value outside the allowed ones. True is not 1; a member of a str enumeration is a str."""
    if isinstance(value, str) and value in allowed:
        return
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in allowed):
        raise ValueError(
            f"{name}={described(value)} does not exist; choose one of {', '.join(str(a) for a in allowed)}"
        )


def member(name: str, value: Any, kind: type[Enum]) -> None:
    """A member of an enumeration; its name or its number is none."""
    if not isinstance(value, kind):
        raise TypeError(
            f"{name}={described(value)} is no {kind.__name__}; give one of "
            + ", ".join(f"{kind.__name__}.{choice}" for choice in kind.__members__)
        )


def whole_numbers(name: str, value: Any) -> None:
    """A sequence of whole numbers."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(f"{name}={described(value)} is no sequence; give a list of whole numbers")
    for item in value:
        if isinstance(item, bool) or not isinstance(item, Integral):
            raise TypeError(
                f"{name}={described(value)} holds {described(item)}; give a list of whole numbers"
            )
