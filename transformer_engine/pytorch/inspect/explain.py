"""explain(function, *args): the backend that each operation of a call uses, and why the others are unsupported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...common.checks import function as checked_function
from ...common.checks import switch
from ...common.explanation import Decision, Explanation, explained

__all__ = ["Decision", "Explanation", "explain"]


def explain(function: Callable[..., Any], *args: Any, backward: bool = True, **kwargs: Any) -> Explanation:
    """Run function(*args, **kwargs) and report which backend each operation uses.

    The call is executed. Its side effects remain, including updates of the amax histories of delayed scaling.

    Args:
        function: A module or another callable.
        args: Positional arguments of the call.
        backward: Also run the backward pass of the first tensor that the call returns. No `.grad` is modified.
        kwargs: Keyword arguments of the call.

    Raises:
        TypeError: function is not callable, or it is a module class that cannot be constructed from the arguments.
    """
    checked_function("function", function)
    switch("backward", backward)

    def call() -> None:
        result = _called(function, args, kwargs)
        first = result[0] if isinstance(result, (tuple, list)) else result
        if backward and isinstance(first, Tensor) and first.requires_grad:
            _differentiate(first, function, (*args, *kwargs.values()))

    return explained(call)


def _called(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function. If a module class was passed by mistake, the error says so."""
    if not (isinstance(function, type) and issubclass(function, torch.nn.Module)):
        return function(*args, **kwargs)
    try:
        return function(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"function is the class {function.__name__}, which cannot be constructed from the given arguments: "
            f"{error}. "
            f"To explain a forward pass, construct the module first: explain({function.__name__}(...), x)"
        ) from error


def _differentiate(output: Tensor, function: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
    """Compute the gradients of the sum of output and discard them."""
    leaves = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    if isinstance(function, torch.nn.Module):
        leaves += [p for p in function.parameters() if p.requires_grad]
    if leaves:
        torch.autograd.grad(output.float().sum(), leaves, allow_unused=True)
