"""constant_while_tracing(function): torch.compile calls it for real while tracing, and keeps the answer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

F = TypeVar("F", bound=Callable)


def constant_while_tracing(function: F) -> F:
    """What torch.compiler.assume_constant_result does, without importing the compiler, which takes a second."""
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def warn_deprecated(name: str, instead: str) -> None:
    """A DeprecationWarning at the caller of the function of that name; none while a compiler traces."""
    if not torch.compiler.is_compiling():
        warnings.warn(f"{name} is deprecated; use {instead}", DeprecationWarning, stacklevel=3)


def text_of_number(value: float) -> str:
    """The number as a constant for `number_while_tracing`; exact."""
    return float(value).hex()


@constant_while_tracing
def number_while_tracing(text: str) -> float:
    """The number of a text: in a graph of dynamic shapes a float is a symbol, which no choice can be made by."""
    return float.fromhex(text)
