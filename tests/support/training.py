"""Several training steps on a layer with all results, and a node whose backward pass fails on request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Recipe


def train(
    layer: torch.nn.Module,
    recipe: Recipe,
    shape: tuple[int, ...],
    steps: int = 3,
    run: Callable[[Any, Tensor], Tensor] = lambda layer, x: layer(x),
) -> tuple[list[Tensor], int]:
    """Outputs and gradients over several steps, and how many bytes the last forward pass saved.

    Args:
        layer: The layer.
        recipe: Recipe for its forward pass.
        shape: Input shape; a new input is drawn for each step.
        steps: How many steps to run.
        run: Function (layer, x) -> y.
    """
    results: list[Tensor] = []
    saved: dict[tuple[int, int], int] = {}
    device = next(layer.parameters()).device
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(*shape, dtype=torch.bfloat16, device=device) * (1 + step)
        x.requires_grad_()
        saved.clear()

        def pack(tensor: Tensor) -> Tensor:
            parameter = any(tensor.data_ptr() == p.data_ptr() for p in layer.parameters())
            saved[tensor.data_ptr(), tensor.nbytes] = 0 if parameter else tensor.nbytes
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            te.autocast(recipe=recipe),
        ):
            y = run(layer, x)
        y.float().sin().sum().backward()
        assert x.grad is not None
        results += [
            y.detach(),
            x.grad,
            *[p.grad.clone() for p in layer.parameters() if p.grad is not None],
        ]
        layer.zero_grad()
    return results, sum(saved.values())


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether two lists of tensors are equal, bit for bit."""
    return all(torch.equal(left, right) for left, right in zip(a, b, strict=True))


class Fails(torch.autograd.Function):
    """y = x, whose backward raises while `Fails.now` is set."""

    now = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        if Fails.now:
            raise KeyError("backward failed")
        return grad
