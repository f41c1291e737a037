"""Text that shows a value in an error message."""

from __future__ import annotations

from typing import Any

LONGEST = 80  # characters of a value that a message repeats


def described(value: Any) -> str:
    """Return the type, shape and dtype of an array, and the repr of other values, truncated to `LONGEST` characters."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return f"a {type(value).__name__} of shape {list(shape)} and {dtype}"
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({type(value).__name__})"
