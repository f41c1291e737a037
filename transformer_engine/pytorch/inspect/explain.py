"""explain(function, *args): which backend every operation of a call chose, and why the others were not taken."""

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
    """Run function(*args, **kwargs), a module for example, and report the choice of every operation's backend.

    backward   also run the backward pass of the first tensor that it returns; no .grad is touched

    The call is made for real: what it changes, the amax histories of delayed scaling included, is changed.
    """
    checked_function("function", function)
    switch("backward", backward)

    def call() -> None:
        result = function(*args, **kwargs)
        first = result[0] if isinstance(result, (tuple, list)) else result
        if backward and isinstance(first, Tensor) and first.requires_grad:
            _differentiate(first, function, (*args, *kwargs.values()))

    return explained(call)


def _differentiate(output: Tensor, function: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
    """Gradients of the sum of output, thrown away."""
    leaves = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    if isinstance(function, torch.nn.Module):
        leaves += [p for p in function.parameters() if p.requires_grad]
    if leaves:
        torch.autograd.grad(output.float().sum(), leaves, allow_unused=True)
