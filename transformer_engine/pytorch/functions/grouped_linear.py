"""y_i [M_i, N] = x_i [M_i, K] @ w_i [N, K].T + b_i for consecutive groups of rows: linear's functions, group by group.

Every group has its own quantizers and its own products, so that the result equals a loop of linear layers bit for
bit; the groups share one node of the autograd graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .caller_buffers import NO_BUFFERS, CallerBuffers, handed_out, readable
from .linear import linear_backward, linear_forward
from .linear_spec import LinearSaved, LinearSpec
from .saving import backward_of, restore, save
from .stacks import members_of, stacked_gradient
from .weight_gradient import WeightGradient


@dataclass(frozen=True)
class GroupedLinearSpec:
    """rows of each group, the spec of each group's linear layer, and where the caller wants the results.

    stacked_weight, stacked_bias   all groups' are one parameter [n, ..]
    """

    rows: tuple[int, ...]
    groups: tuple[LinearSpec, ...]
    needs_grad: bool = True
    buffers: CallerBuffers = NO_BUFFERS
    stacked_weight: bool = False
    stacked_bias: bool = False


def grouped_linear(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], spec: GroupedLinearSpec
) -> Tensor:
    """y [sum M_i, N], differentiable in x, every weight and every bias; of stacks there is one in its list."""
    if spec.needs_grad:
        return _GroupedLinear.apply(x, spec, *weights, *biases)  # pyright: ignore[reportReturnType]
    return _forward(x, weights, biases, spec)[0]


def _forward(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], spec: GroupedLinearSpec
) -> tuple[Tensor, list[LinearSaved]]:
    if spec.stacked_weight:
        weights = members_of(weights[0])
    if spec.stacked_bias and biases[0] is not None:
        biases = members_of(biases[0])
    outputs: list[Tensor] = []
    saved: list[LinearSaved] = []
    for part, weight, bias, group in zip(x.split(spec.rows), weights, biases, spec.groups, strict=True):
        y, operands = linear_forward(part, weight, bias, group)
        outputs.append(y)
        saved.append(operands)
    return _joined(outputs, spec.buffers.output), saved


def _joined(parts: list[Tensor], buffer: Tensor | None) -> Tensor:
    return torch.cat(parts) if buffer is None else handed_out(torch.cat(parts, out=buffer))


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, spec, *parameters):
        count = 1 if spec.stacked_weight else len(spec.rows)
        weights, biases = parameters[:count], parameters[count:]
        y, saved = _forward(x, list(weights), list(biases), spec)
        save(ctx, (), [operand for operands in saved for operand in operands], spec.groups[0].scale_update)
        ctx.spec, ctx.weight_dtype = spec, weights[0].dtype
        ctx.bias_dtype = weights[0].dtype if biases[0] is None else biases[0].dtype
        return y

    @staticmethod
    @backward_of("GroupedLinear")
    def backward(ctx, grad_output):  # pyright: ignore[reportIncompatibleMethodOverride]
        spec = ctx.spec
        _, operands = restore(ctx)
        if spec.buffers.grad_input is not None:
            grad_output = readable(grad_output, spec.buffers.grad_input)
        grads = [
            linear_backward(part, operands[2 * i : 2 * i + 2], group, ctx.weight_dtype, ctx.bias_dtype)
            for i, (part, group) in enumerate(zip(grad_output.split(spec.rows), spec.groups, strict=True))
        ]
        inputs = [grad.input for grad in grads if grad.input is not None]
        grad_input = None
        if inputs:
            grad_input = _joined(inputs, spec.buffers.grad_input)
        weights, biases = [grad.weight for grad in grads], [grad.bias for grad in grads]
        if spec.stacked_weight:
            weights = [stacked_gradient(weights, spec.groups[0].weight_gradient)]
        if spec.stacked_bias:
            biases = [stacked_gradient(biases, WeightGradient())]
        return grad_input, None, *weights, *biases
