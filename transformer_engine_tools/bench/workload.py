"""Workload: y = function(*inputs, **keywords) under a context, as the two steps that are measured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .measure import Effort, Figures, measure, peak_mib


@dataclass(frozen=True)
class Workload:
    """The workload that a provider built for a case.

    Attributes:
        function: A module or a plain function.
        inputs: Its arguments; the floating-point ones get gradients in a backward step.
        keywords: Arguments without gradients.
        context: Context manager that is entered around each forward pass.
    """

    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    keywords: dict[str, Any] = field(default_factory=dict)
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def compiled(self) -> Workload:
        """Wrap the function in torch.compile."""
        return replace(self, function=torch.compile(self.function))

    def measured(self, backward: bool, device: torch.device, effort: Effort) -> Figures:
        """Measure the forward pass, or with `backward` the forward and backward pass."""
        step = self.step(backward)
        return Figures(measure(step, device, effort), peak_mib(step, device))

    def step(self, backward: bool) -> Callable[[], None]:
        """Build one forward pass without gradients, or one forward and backward pass that replaces every .grad."""
        if backward:
            inputs = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in self.inputs)
            leaves = [x for x in inputs if x.requires_grad]
            if isinstance(self.function, nn.Module):
                leaves += list(self.function.parameters())
            with torch.no_grad(), self.context():
                gradient = torch.randn_like(self.function(*inputs, **self.keywords))

            def step() -> None:
                for leaf in leaves:
                    leaf.grad = None
                with self.context():
                    y = self.function(*inputs, **self.keywords)
                y.backward(gradient)

            return step

        def forward_step() -> None:
            with torch.no_grad(), self.context():
                self.function(*self.inputs, **self.keywords)

        return forward_step


def draw_routed_tokens(case: Any, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Draw tokens [T, hidden], the routing map bool [T, experts] of a case, and probabilities [T, experts]."""
    a = case.arguments
    shape = (a["tokens"], a["experts"])
    expert_ids = torch.rand(*shape, device=device).topk(a["places"], dim=1).indices
    mask = torch.zeros(*shape, dtype=torch.bool, device=device).scatter_(1, expert_ids, True)
    tokens = torch.randn(a["tokens"], a["hidden"], device=device, dtype=torch.bfloat16)
    return tokens, mask, torch.rand(*shape, device=device)
