"""Checks for single values: each raises an error with the argument's name, the value, the limit and the remedy.

A value with the wrong type raises TypeError, a value outside its limits ValueError. The functions in this module leave
the value unchanged and do not accept a bool, a float or an array as a whole number; `numbers` converts values from
every form that callers use.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from numbers import Integral, Real
from typing import Any, TypeVar, cast

from .numbers import described as described
from .numbers import to_bool, with_article

Function = TypeVar("Function", bound=Callable[..., Any])


def nearest(name: str, names: Collection[str]) -> str | None:
    """The most similar of several names, the only one that begins with this word, or None."""
    matches = difflib.get_close_matches(name, names, 1)
    if matches:
        return matches[0]
    longer = [known for known in names if known.startswith(f"{name}_")]
    return longer[0] if len(longer) == 1 else None


def suggestion(name: str, names: Collection[str]) -> str:
    """End of an error message that suggests the most similar of several names; "" if none is similar."""
    near = nearest(name, names)
    return "" if near is None else f" (did you mean {near!r}?)"


def reject_keywords(
    function: str,
    keywords: Collection[str],
    renamed: Mapping[str, str],
    names: Collection[str] = (),
) -> None:
    """Raise TypeError for unknown keywords.

    Args:
        function: Name of the called function.
        keywords: The unknown keywords.
        renamed: {former name: present name} of renamed keywords.
        names: Parameters of the function, of which the message suggests the most similar.
    """
    for name in keywords:
        if name in renamed:
            remedy = f"use {renamed[name]}="
        elif (near := nearest(name, names)) is not None:
            remedy = f"did you mean {near}=?"
        else:
            remedy = f"leave it out, or see help({function})"
        raise TypeError(f"{function}() takes no {name}=; {remedy}")


def keyword_names(function: Callable[..., Any]) -> dict[str, None] | None:
    """Parameters that callers of a function can name, in order; None if it takes any keyword."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return {p.name: None for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def suggests_keywords(function: Function) -> Function:
    """Decorate a function or a constructor: an unknown keyword raises TypeError with the most similar parameter.

    A function with **keywords is returned unchanged. For a class, the constructor is decorated.
    """
    if isinstance(function, type):
        function.__init__ = suggests_keywords(function.__init__)
        return cast(Function, function)
    names = keyword_names(function)
    if names is None:
        return function
    is_constructor = function.__name__ == "__init__"

    @functools.wraps(function)
    def with_known_keywords(*arguments: Any, **options: Any) -> Any:
        for name in options:
            if name not in names:
                called = type(arguments[0]).__name__ if is_constructor else function.__name__
                reject_keywords(called, (name,), {}, names)
        return function(*arguments, **options)

    return cast(Function, with_known_keywords)


def accepts_former_keywords(**renamed: str) -> Callable[[Function], Function]:
    """Decorate a function that also accepts parameters under former keywords.

    Args:
        **renamed: {former keyword: parameter name}. The signature has the present names only.

    Raises:
        TypeError: A call passes a parameter under both keywords.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def with_present_keywords(*arguments: Any, **options: Any) -> Any:
            for former in renamed.keys() & options.keys():
                present = renamed[former]
                if present in options:
                    raise TypeError(
                        f"{function.__name__}() got {present} and {former}, its former name; pass {present} only"
                    )
                options[present] = options.pop(former)
            return function(*arguments, **options)

        return cast(Function, with_present_keywords)

    return decorate


def whole(name: str, value: Any, least: int = 1) -> None:
    """Raise an error unless value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(
            f"{name}={described(value)} must be a whole number; give an int of at least {least}"
        )
    if value < least:
        raise ValueError(
            f"{name}={value} is below {least}; give a whole number of at least {least}"
        )


def whole_or_none(name: str, value: Any, least: int = 1) -> None:
    """Raise an error unless value is None or a whole number of at least `least`."""
    if value is not None:
        whole(name, value, least)


def integer(name: str, value: Any) -> None:
    """Raise an error unless value is a whole number; negative numbers are valid."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={described(value)} must be a whole number; give an int")


def number(name: str, value: Any) -> None:
    """Raise an error unless value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={described(value)} must be a number; give a float")
    # Compared instead of tested with isfinite, which does not accept a tracer's symbol.
    if not -math.inf < value < math.inf:  # pyright: ignore[reportOperatorIssue]
        raise ValueError(f"{name}={value} is not finite; give a finite number")


def number_or_none(name: str, value: Any) -> None:
    """Raise an error unless value is None or a finite number."""
    if value is not None:
        number(name, value)


def epsilon(name: str, value: Any) -> None:
    """Raise an error unless value is a finite number >= 0, such as the eps that keeps a divisor above zero."""
    number(name, value)
    if value < 0:
        raise ValueError(f"{name}={value} is below 0; give a small number such as 1e-5, or 0")


def positive(name: str, value: Any) -> None:
    """Raise an error unless value is a finite number > 0."""
    number(name, value)
    if value <= 0:
        raise ValueError(f"{name}={value} must be above 0; give a positive number")


def exponent(name: str, value: Any) -> None:
    """Raise an error unless 2 to the power of value is a normal float32, by which a scale can be divided."""
    number(name, value)
    if not -126 <= value <= 127:
        raise ValueError(
            f"{name}={value}: 2^{value} is not a normal float32; give a number from -126 to 127"
        )


def drop_rate(name: str, value: Any) -> None:
    """Raise an error unless value is a drop fraction in [0, 1): at 1, the scaling divides by zero."""
    number(name, value)
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name}={value} is outside [0, 1); give the fraction of elements to drop")


def switch(name: str, value: Any) -> None:
    """Raise TypeError for a value without a truth value; `numbers.to_bool` converts all others."""
    if value is not True and value is not False and value is not None:
        to_bool(name, value)


def text_or_none(name: str, value: Any) -> None:
    """Raise TypeError unless value is None or a str."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name}={described(value)} must be a str; give a name, or None")


def function(name: str, value: Any) -> None:
    """Raise TypeError unless value is callable."""
    if not callable(value):
        raise TypeError(f"{name}={described(value)} cannot be called; give a function")


def function_or_none(name: str, value: Any) -> None:
    """Raise TypeError unless value is None or callable."""
    if value is not None and not callable(value):
        raise TypeError(f"{name}={described(value)} cannot be called; give a function, or None")


def check_option(name: str, value: Any, allowed: Collection[Any]) -> None:
    """Raise ValueError unless value is one of the allowed values. True is not 1; a str enumeration member is a str."""
    if isinstance(value, str) and value in allowed:
        return
    if not any(
        value is choice or (type(value) is type(choice) and value == choice) for choice in allowed
    ):
        names = [choice for choice in allowed if isinstance(choice, str)]
        raise ValueError(
            f"{name}={described(value)} does not exist; choose one of {', '.join(str(a) for a in allowed)}"
            + (suggestion(value, names) if isinstance(value, str) else "")
        )


def member(name: str, value: Any, kind: type[Enum]) -> None:
    """Raise TypeError unless value is an enumeration member; its name or its number is not accepted."""
    if not isinstance(value, kind):
        raise TypeError(
            f"{name}={described(value)} is not {with_article(kind)}; give one of "
            + ", ".join(f"{kind.__name__}.{choice}" for choice in kind.__members__)
        )


def integers(name: str, value: Any) -> None:
    """Raise TypeError unless value is a sequence of whole numbers."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(
            f"{name}={described(value)} is not a sequence; give a list of whole numbers"
        )
    for item in value:
        if isinstance(item, bool) or not isinstance(item, Integral):
            raise TypeError(
                f"{name}={described(value)} holds {described(item)}; give a list of whole numbers"
            )
