"""What is done otherwise while torch.compile traces."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable)
_unsafe_view = torch.ops.aten._unsafe_view.default


def constant_while_tracing(function: F) -> F:
    """What torch.compiler.assume_constant_result does, without importing the compiler, which takes a second."""
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def in_eager_mode(function: F) -> F:
    """Decorate a function that ends a compiled graph and runs in eager mode, without importing the compiler."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return run  # pyright: ignore[reportReturnType]


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


def result_in(y: Tensor, shape: Sequence[int]) -> Tensor:
    """A fresh y in another shape, for what an autograd function gives back: no view to autograd, as y itself is none.

    A view that was made within such a function cannot be written in place. y shares its memory but not its count of
    writes with the result: whatever else is kept of y has to be the result itself. A compiler follows views by itself.
    """
    if torch.compiler.is_compiling():
        return y.view(shape)
    return _unsafe_view(y, shape)


def text_of_number(value: float) -> str:
    """The number as a constant for `number_while_tracing`; exact."""
    return float(value).hex()


@constant_while_tracing
def number_while_tracing(text: str) -> float:
    """The number of a text: in a graph of dynamic shapes a float is a symbol, which no choice can be made by."""
    return float.fromhex(text)
