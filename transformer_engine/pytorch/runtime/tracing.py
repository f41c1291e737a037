"""What is done otherwise while torch.compile traces."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable)


def constant_while_tracing(function: F) -> F:
    """What torch.compiler.assume_constant_result does, without importing the compiler, which takes a second."""
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def warn_deprecated(name: str, instead: str) -> None:
    """A DeprecationWarning at the caller of the function of that name; none while a compiler traces."""
    if not torch.compiler.is_compiling():
        warnings.warn(f"{name} is deprecated; use {instead}", DeprecationWarning, stacklevel=3)


def result_as(y: Tensor, dtype: torch.dtype) -> Tensor:
    """y in a dtype, for what an autograd function gives back; while a compiler traces, a tensor of its own.

    torch 2.11 loses the gradient of a traced function's result that it knows under a second name, as y is where the
    dtype is y's.
    """
    return y.to(dtype, copy=torch.compiler.is_compiling())


def text_of_number(value: float) -> str:
    """The number as a constant for `number_while_tracing`; exact."""
    return float(value).hex()


@constant_while_tracing
def number_while_tracing(text: str) -> float:
    """The number of a text: in a graph of dynamic shapes a float is a symbol, which no choice can be made by."""
    return float.fromhex(text)
