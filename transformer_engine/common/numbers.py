"""Numbers and flags in every form that callers pass them: Python, NumPy and array scalars, and text.

`to_int`, `to_ints`, `to_float` and `to_bool` convert function arguments. A number may be an `int`, a `float`
with an integral value, a `bool`, a NumPy scalar, or a tensor or array with one element. A flag may be any object whose
class defines a truth value.

`parse_int`, `parse_float` and `parse_bool` convert recipe fields, whose values often come from YAML files or
command lines. They also read text, with the spellings that pydantic reads: `"1024"`, `"1e-4"`, `"true"`, `"off"`.

Symbolic numbers from `torch.compile` and `torch.export` are returned unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from .warning import warn_once

LONGEST = 80  # characters of a value that an error message repeats
_SYMBOLS = ("SymInt", "SymFloat", "SymBool")
_TRUE = ("1", "true", "t", "yes", "y", "on")
_FALSE = ("0", "false", "f", "no", "n", "off")


def described(value: Any) -> str:
    """Describe an array by type, shape and dtype, and other values by repr, truncated to `LONGEST` characters."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{with_article(type(value))} of shape {list(shape)} and {dtype}"
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({type(value).__name__})"


def with_article(kind: type | str) -> str:
    """Prefix a class name with its article, for messages: "an int", "a uint8", "an MXFP8Tensor"."""
    name = kind if isinstance(kind, str) else kind.__name__
    # An abbreviation is read letter by letter ("em ex", "en dee"), another name as a word.
    is_abbreviation = name[:2].isupper() or name == "ndarray"
    vowels = "AEFHILMNORSXn" if is_abbreviation else "AEIOaeio"
    return f"{'an' if name[:1] in vowels else 'a'} {name}"


def to_int(name: str, value: Any, least: int | None = None) -> int:
    """Convert an argument to an `int`.

    Args:
        name: Argument name, for error messages.
        value: Whole number in any form from this module's description.
        least: Smallest valid value; None accepts every whole number.

    Raises:
        TypeError: The value is not a whole number.
        ValueError: The value is below `least`.
    """
    if type(value) is int:
        integer = value
    else:
        integer = _to_whole_number(value)
        if integer is None:
            limit = "" if least is None else f" of at least {least}"
            raise TypeError(f"{name}={described(value)} must be a whole number; give an int{limit}")
    if least is not None and integer < least:
        raise ValueError(
            f"{name}={integer} is below {least}; give a whole number of at least {least}"
        )
    return integer


def to_ints(name: str, value: Any) -> Sequence[int]:
    """Convert an argument to an int sequence; a list or tuple of ints is returned unchanged.

    Args:
        name: Argument name, for error messages.
        value: List, tuple or other iterable of whole numbers in any form from this module's description, or an array or
            tensor with one dimension. A tensor on a GPU is read by the host.

    Raises:
        TypeError: The value is not a sequence of whole numbers.
    """
    if isinstance(value, (list, tuple)) and set(map(type, value)) <= {int}:
        return value
    to_list = getattr(value, "tolist", None)
    if to_list is not None:
        if len(value.shape) != 1:  # pyright: ignore[reportAttributeAccessIssue]
            raise TypeError(f"{name} is {described(value)}; give whole numbers in one dimension")
        numbers: Any = to_list()
    elif isinstance(value, (str, bytes, Mapping, set)) or not hasattr(value, "__iter__"):
        raise TypeError(
            f"{name}={described(value)} is not a sequence; give a list of whole numbers"
        )
    else:
        numbers = list(value)
    integers: list[int] = []
    for number in numbers:
        try:
            integers.append(to_int(name, number))
        except TypeError:
            raise TypeError(
                f"{name}={described(value)} holds {described(number)}; give a list of whole numbers"
            ) from None
    return integers


def to_float(name: str, value: Any) -> float:
    """Convert an argument to a `float`; infinities and NaN are left to the caller.

    Raises:
        TypeError: The value is not a real number.
    """
    if type(value) is float:
        return value
    number = _python_number(value)
    if type(number).__name__ in _SYMBOLS:
        return number
    if not isinstance(number, Real):
        raise TypeError(f"{name}={described(value)} must be a number; give a float")
    return float(number)


def to_bool(name: str, value: Any) -> bool:
    """Convert a flag to a `bool` by its truth value, as `if value:` does.

    A non-empty string is True; "false" and "0" issue one warning.

    Raises:
        TypeError: The value's class defines no truth value (a function, a class, a dtype), or it is an array with more
            than one element.
    """
    if value is True or value is False:
        return value
    if value is None:
        return False
    number = _python_number(value)
    if type(number).__name__ in _SYMBOLS:
        return number
    if isinstance(number, str) and number.strip().lower() in _FALSE:
        warn_once(
            f"text as a flag: {name}",
            f"{name}={number!r} is a non-empty string and counts as True; pass False to switch it off",
        )
    if not isinstance(number, (int, float, str)) and not _defines_truth(number):
        raise TypeError(f"{name}={described(value)} is neither True nor False; give a bool")
    return bool(number)


def _defines_truth(value: Any) -> bool:
    """Whether `bool(value)` depends on the value; for arrays with several elements it raises an error."""
    if isinstance(value, type) or (hasattr(value, "shape") and hasattr(value, "dtype")):
        return False
    return hasattr(type(value), "__bool__") or hasattr(type(value), "__len__")


def parse_int(name: str, value: Any, least: int | None = None) -> int:
    """`to_int` for a recipe field: also reads text such as "1024" and "1.0"."""
    return to_int(name, _number_in_text(value), least)


def parse_float(name: str, value: Any) -> float:
    """`to_float` for a recipe field: also reads text such as "1e-4"."""
    return to_float(name, _number_in_text(value))


def parse_bool(name: str, value: Any) -> bool:
    """Convert a flag of a recipe to a `bool`.

    Accepts True, False, None (False), the numbers 0 and 1, and the text "true", "t", "yes", "y", "on", "1" and their
    opposites in any case.

    Raises:
        TypeError: The value is anything else.
    """
    if value is True or value is False:
        return value
    if value is None:
        return False
    boolean = _python_number(value)
    if isinstance(boolean, bytes):
        boolean = boolean.decode(errors="replace")
    if isinstance(boolean, str):
        if boolean.lower() in _TRUE:
            return True
        if boolean.lower() in _FALSE:
            return False
    elif isinstance(boolean, Real) and boolean in (0, 1):
        return bool(boolean)
    raise TypeError(f"{name}={described(value)} is neither True nor False; give a bool")


def _python_number(value: Any) -> Any:
    """Convert a NumPy scalar, or a one-element tensor or array, to a Python number; return other values unchanged."""
    if isinstance(value, (int, float, str)):
        return value
    shape, item = getattr(value, "shape", None), getattr(value, "item", None)
    if item is None or not isinstance(shape, tuple) or math.prod(shape) != 1:
        return value
    return item()


def _to_whole_number(value: Any) -> Any:
    """Convert the value to an `int` or symbol, or return None if it is not a whole number."""
    number = _python_number(value)
    if type(number).__name__ in _SYMBOLS:
        return number
    if isinstance(number, float):
        return int(number) if number.is_integer() else None
    if isinstance(number, Integral) or hasattr(type(number), "__index__"):
        return None if hasattr(number, "dtype") else number.__index__()
    return None


def _number_in_text(value: Any) -> Any:
    """Parse the number that a string or bytes object spells; return everything else unchanged."""
    if not isinstance(value, (str, bytes)):
        return value
    for read in (int, float):
        try:
            return read(value)
        except ValueError:
            continue
    return value
