"""Marks for functions whose results are constants in compiled graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_while_tracing(function: Function) -> Function:
    """Decorate a function: torch.compile calls it while it traces, and treats the result as a constant.

    Equal to torch.compiler.assume_constant_result, which would import the compiler for a second.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function
