"""explain(function, *args): the backend that each operation in a call uses, and why the others are unsupported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...common.checks import function as checked_function
from ...common.checks import switch
from ...common.dispatch import observing, tables
from ...common.explanation import (
    Decision,
    Explanation,
    PassReport,
    PassStepReport,
    chosen_name,
    explain_call,
)
from ..functions.layer import runners
from .pass_trace import PassTrace

__all__ = ["Decision", "Explanation", "PassReport", "PassStepReport", "explain"]


def explain(
    function: Callable[..., Any],
    *args: Any,
    backward: bool = True,
    steps: bool = False,
    **kwargs: Any,
) -> Explanation:
    """Run function(*args, **kwargs) and report which backend each operation uses.

    The call is executed. Its side effects remain, including updates to the amax histories of delayed scaling.

    Args:
        function: A module or another callable.
        args: Positional call arguments.
        backward: Also run the backward pass from the first tensor that the call returns. No `.grad` is modified.
        steps: Also report the steps in every pass of Linear, LayerNormLinear, LayerNormMLP,
            GroupedLinear and chains of `te.ops`: results, backends and saved tensors.
        kwargs: Keyword call arguments.

    Raises:
        TypeError: function is not callable, or it is a module class that cannot be constructed from the arguments.
    """
    checked_function("function", function)
    switch("backward", backward)
    switch("steps", steps)

    def call() -> None:
        result = _call_function(function, args, kwargs)
        first = result[0] if isinstance(result, (tuple, list)) else result
        if backward and isinstance(first, Tensor) and first.requires_grad:
            leaves = [
                t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.requires_grad
            ]
            if isinstance(function, torch.nn.Module):
                leaves += [p for p in function.parameters() if p.requires_grad]
            if leaves:
                torch.autograd.grad(first.float().sum(), leaves, allow_unused=True)

    if not steps:
        return explain_call(call)
    watcher = _PassWatcher()
    runners.append(watcher.run)
    try:
        with observing(watcher.ask):
            explanation = explain_call(call)
    finally:
        runners.remove(watcher.run)
    return replace(explanation, passes=tuple(watcher.trace.reports))


@dataclass(eq=False)
class _PassWatcher:
    """Collects the steps of passes while they run."""

    trace: PassTrace = field(default_factory=PassTrace)
    _asked: list[str] = field(default_factory=list)

    def run(
        self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...], count: int | None
    ) -> Any:
        """Run a pass that is a plain function; the arguments are as in `PassTrace.run`."""
        self.trace.asked = self._asked
        return self.trace.run(name, function, arguments, count)

    def ask(self, operation: str, request: Any) -> None:
        """Note the backend that an operation chooses during the step that runs."""
        name = f"{operation}: {chosen_name(tables[operation].explain(request))}"
        if name not in self._asked:
            self._asked.append(name)


def _call_function(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call the function. If a module class was passed by mistake, the error says so."""
    if not (isinstance(function, type) and issubclass(function, torch.nn.Module)):
        return function(*args, **kwargs)
    try:
        return function(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"function is the class {function.__name__}, which cannot be constructed from the given arguments: "
            f"{error}. To explain a forward pass, construct the module first: explain({function.__name__}(...), x)"
        ) from error
