"""constant_while_tracing(function): torch.compile calls it for real while tracing, and keeps the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable)


def constant_while_tracing(function: F) -> F:
    """What torch.compiler.assume_constant_result does, without importing the compiler, which takes a second."""
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function
