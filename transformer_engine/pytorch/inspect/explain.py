"""explain(function, *args): which backend every operation of a call chose, and why the others were not taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...common.checks import function as checked_function
from ...common.checks import switch
from ...common.dispatch import Verdict, observing, tables


@dataclass(frozen=True)
class Decision:
    """One kind of request to an operation, how often it was made, and every backend's answer in order."""

    operation: str
    request: Any
    count: int
    verdicts: tuple[Verdict, ...]

    @property
    def chosen(self) -> str | None:
        """The backend that was used."""
        return next((verdict.backend for verdict in self.verdicts if verdict.chosen), None)


@dataclass(frozen=True)
class Explanation:
    """The decisions of one call in the order in which they were first made; str() is a readable table."""

    decisions: tuple[Decision, ...]

    def __str__(self) -> str:
        lines: list[str] = []
        for decision in self.decisions:
            lines.append(f"{decision.operation}: {decision.chosen} ({decision.count}x)")
            lines += [f"    not {v.backend}: {v.refusal}" for v in decision.verdicts if not v.chosen]
        return "\n".join(lines)


def explain(function: Callable[..., Any], *args: Any, backward: bool = True, **kwargs: Any) -> Explanation:
    """Run function(*args, **kwargs), a module for example, and report the choice of every operation's backend.

    backward   also run the backward pass of the first tensor that it returns; no .grad is touched

    The call is made for real: what it changes, the amax histories of delayed scaling included, is changed.
    """
    checked_function("function", function)
    switch("backward", backward)
    counts: dict[tuple[str, Any], int] = {}

    def see(operation: str, request: Any) -> None:
        counts[operation, request] = counts.get((operation, request), 0) + 1

    with observing(see):
        result = function(*args, **kwargs)
        first = result[0] if isinstance(result, (tuple, list)) else result
        if backward and isinstance(first, Tensor) and first.requires_grad:
            _differentiate(first, function, (*args, *kwargs.values()))
    return Explanation(
        tuple(
            Decision(operation, request, count, tuple(tables[operation].explain(request)))
            for (operation, request), count in counts.items()
        )
    )


def _differentiate(output: Tensor, function: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
    """Gradients of the sum of output, thrown away."""
    leaves = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    if isinstance(function, torch.nn.Module):
        leaves += [p for p in function.parameters() if p.requires_grad]
    if leaves:
        torch.autograd.grad(output.float().sum(), leaves, allow_unused=True)
