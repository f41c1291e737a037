"""y_i [M_i, N] = x_i [M_i, K] @ w_i [N, K].T + b_i for consecutive groups of rows: a linear layer's passes per group.

Every group has its own quantizers and its own products, so that the result equals a loop of linear layers bit for
bit; the groups share one node of the autograd graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .caller_buffers import NO_BUFFERS, CallerBuffers, handed_out, readable
from .linear_spec import LinearSpec
from .run import run
from .saving import backward_of, restore, save
from .scale_update import ScaleUpdate
from .stacks import members_of, stacked_gradient
from .weight_gradient import WeightGradient


@dataclass(frozen=True)
class GroupedLinearSpec:
    """A call of a GroupedLinear whose groups are multiplied one by one.

    Attributes:
        rows: Number of rows of each group.
        groups: Spec of each group's linear layer.
        needs_grad: Some tensor needs a gradient.
        buffers: Where the caller wants the results.
        stacked_weight: The weights of all groups are one parameter [n, N, K].
        stacked_bias: The biases of all groups are one parameter [n, N].
        scale_update: What delayed scaling updates after the backward pass.
    """

    rows: tuple[int, ...]
    groups: tuple[LinearSpec, ...]
    needs_grad: bool = True
    buffers: CallerBuffers = NO_BUFFERS
    stacked_weight: bool = False
    stacked_bias: bool = False
    scale_update: ScaleUpdate | None = None


def grouped_linear(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], spec: GroupedLinearSpec
) -> Tensor:
    """Compute y [sum M_i, N], differentiable in x, every weight and every bias; a stack is one entry of its list."""
    if spec.needs_grad:
        return _GroupedLinear.apply(x, spec, *weights, *biases)  # pyright: ignore[reportReturnType]
    return _forward(x, weights, biases, spec)[0]


def _forward(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], spec: GroupedLinearSpec
) -> tuple[Tensor, list[Any]]:
    """Return y and the saved buffers of all groups."""
    if spec.stacked_weight:
        weights = members_of(weights[0])
    if spec.stacked_bias and biases[0] is not None:
        biases = members_of(biases[0])
    outputs: list[Tensor] = []
    saved: list[Any] = []
    for part, weight, bias, group in zip(x.split(spec.rows), weights, biases, spec.groups, strict=True):
        passes = group.passes
        schedule = passes.forward if spec.needs_grad else passes.inference
        env = group.environment((), tuple(part.shape[:-1]))
        (y,), kept = run(schedule, env, [part, weight] if bias is None else [part, weight, bias])
        outputs.append(y)
        saved += kept
    return _joined(outputs, spec.buffers.output), saved


def _joined(parts: list[Tensor], buffer: Tensor | None) -> Tensor:
    return torch.cat(parts) if buffer is None else handed_out(torch.cat(parts, out=buffer))


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: GroupedLinearSpec, *parameters: Tensor | None) -> Tensor:
        count = 1 if spec.stacked_weight else len(spec.rows)
        weights: Any = parameters[:count]
        biases: Any = parameters[count:]
        y, saved = _forward(x, weights, biases, spec)
        save(ctx, (), saved, spec.scale_update)
        ctx.spec = spec
        ctx.dtypes = (weights[0].dtype, (weights if biases[0] is None else biases)[0].dtype)
        return y

    @staticmethod
    @backward_of("GroupedLinear")
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        spec: GroupedLinearSpec = ctx.spec
        _, saved = restore(ctx)
        if spec.buffers.grad_input is not None:
            grad_output = readable(grad_output, spec.buffers.grad_input)
        inputs: list[Tensor] = []
        weights: list[Tensor | None] = []
        biases: list[Tensor | None] = []
        for part, group in zip(grad_output.split(spec.rows), spec.groups, strict=True):
            schedule = group.passes.backward
            taken = schedule.given - 1
            given = [part, *saved[:taken]]
            del saved[:taken]
            env = group.environment((ctx.dtypes,), tuple(part.shape[:-1]))
            (dx, dw, db), _ = run(schedule, env, given)
            if dx is not None:
                inputs.append(dx)
            weights.append(dw)
            biases.append(db)
        grad_input = _joined(inputs, spec.buffers.grad_input) if inputs else None
        if spec.stacked_weight:
            weights = [stacked_gradient(weights, spec.groups[0].weight_gradient)]
        if spec.stacked_bias:
            biases = [stacked_gradient(biases, WeightGradient())]
        return grad_input, None, *weights, *biases
