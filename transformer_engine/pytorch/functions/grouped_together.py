"""y_e [M_e, N] = x_e [M_e, K] @ w_e [N, K].T + b_e for consecutive groups of rows, with gradients, all at once.

Each of the three products and each of the three quantizations is one operation over all groups, so that the time
the host takes does not grow with their number. Weights are read where they are; their gradients are views of one
stack.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..offload.marks import active as offloading
from ..offload.marks import keep_weight
from ..primitives.grouped_gemm import (
    GroupedColumns,
    GroupedMatrices,
    GroupedRows,
    Groups,
    Matrices,
    irregular,
    product_of_columns,
    product_of_rows,
)
from ..primitives.grouped_quantize import GroupedQuantized, row_sums
from ..runtime.applying import applier
from .caller_buffers import NO_BUFFERS, CallerBuffers, handed_out, readable
from .grouped_quantizer import GroupedQuantizer
from .linear_spec import Accumulation
from .saving import backward_of
from .scale_update import ScaleUpdate
from .stacks import stacked_gradient
from .weight_gradient import WeightGradient, main_grad_of


class TogetherSpec(NamedTuple):
    """Everything that forward and backward need beside the tensors.

    input, weight, grad_output   quantizers of all groups; None, all three, to multiply in dtype
    extents            (N, K) of a weight
    weight_gradients   where each group's goes when that is its main_grad; None: autograd gets them
    cached_weight      the weights as quantized for an earlier microbatch
    scale_update       what delayed scaling updates when this backward has run
    stacked_weight, stacked_bias   all groups' are one parameter [n, ..]
    buffers            where the caller wants the results
    """

    dtype: torch.dtype
    input: GroupedQuantizer | None
    weight: GroupedQuantizer | None
    grad_output: GroupedQuantizer | None
    accumulation: Accumulation
    extents: tuple[int, int]
    weight_dtype: torch.dtype
    needs_grad_input: bool
    needs_grad_weight: bool
    needs_grad_bias: bool
    weight_gradients: tuple[WeightGradient, ...] | None = None
    stacked_weight: bool = False
    stacked_bias: bool = False
    cached_weight: GroupedQuantized | None = None
    scale_update: ScaleUpdate | None = None
    buffers: CallerBuffers = NO_BUFFERS


def grouped_linear_together(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor] | None,
    groups: Groups,
    spec: TogetherSpec,
) -> Tensor:
    """y [total, N] of x [total, K], differentiable in x, every weight [N, K] and every bias [N].

    Of stacks there is one in its list.
    """
    if spec.needs_grad_input or spec.needs_grad_weight or spec.needs_grad_bias:
        return _apply(x, groups, spec, len(weights), *weights, *(biases or ()))
    return _forward(x, weights, biases, groups, spec)[0]


def _forward(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor] | None,
    groups: Groups,
    spec: TogetherSpec,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """y, and the tensors that the backward reads: those of x, then those of the weights."""
    x = x.contiguous()
    bias = None
    if biases:
        bias = biases[0] if spec.stacked_bias else torch.stack(biases)
    matrices_of_groups = weights[0].unbind(0) if spec.stacked_weight else weights
    saved: tuple[Tensor | None, ...]
    if spec.input is None or spec.weight is None:
        rows, matrices = GroupedRows(x), GroupedMatrices(Matrices.of(matrices_of_groups))
        saved = (x if spec.needs_grad_weight else None, *(weights if spec.needs_grad_input else ()))
    else:
        made = spec.input.rows(x, groups, True, spec.needs_grad_weight)
        held = spec.cached_weight
        if held is None:
            held = spec.weight.matrices(Matrices.of(matrices_of_groups), True, spec.needs_grad_input)
        assert made.codes is not None
        rows = GroupedRows(made.codes, made.scale, spec.input.format)
        matrices = GroupedMatrices(codes=held.codes, scale=held.scale, format=spec.weight.format)
        saved = (made.codes_t, made.scale_t)
        saved += (held.codes_t, held.scale_t) if spec.needs_grad_input else (None, None)
        if offloading.synchronizer is not None:
            keep_weight(saved[2])
    exact = spec.accumulation.forward
    out = spec.buffers.output
    y = product_of_rows(rows, matrices, groups, spec.dtype, bias=bias, exact=exact, out=out)
    return y if out is None else handed_out(y), saved


class TogetherGradients(NamedTuple):
    input: Tensor | None
    weights: tuple[Tensor | None, ...]
    biases: tuple[Tensor | None, ...]


def _backward(
    grad_output: Tensor, saved: tuple[Tensor | None, ...], groups: Groups, spec: TogetherSpec
) -> TogetherGradients:
    buffer = spec.buffers.grad_input
    dy = (grad_output if buffer is None else readable(grad_output, buffer)).contiguous()
    grad_biases: tuple[Tensor | None, ...] = ()
    if spec.needs_grad_bias:
        sums = row_sums(dy, groups).to(spec.weight_dtype)
        grad_biases = (sums,) if spec.stacked_bias else sums.unbind(0)
    if spec.grad_output is None or spec.input is None or spec.weight is None:
        by_rows, by_columns = GroupedRows(dy), GroupedColumns(dy)
        x_columns = None if saved[0] is None else GroupedColumns(saved[0])
        kept = saved[1].unbind(0) if saved[1:] and spec.stacked_weight else saved[1:]  # pyright: ignore
        weights = GroupedMatrices(Matrices.of(kept), transposed=True) if kept else None  # pyright: ignore
    else:
        made = spec.grad_output.rows(dy, groups, spec.needs_grad_input, spec.needs_grad_weight)
        kind = spec.grad_output.format
        by_rows = None if made.codes is None else GroupedRows(made.codes, made.scale, kind)
        by_columns = None if made.codes_t is None else GroupedColumns(made.codes_t, made.scale_t, kind)
        x_columns = None if saved[0] is None else GroupedColumns(saved[0], saved[1], spec.input.format)
        weights = None
        if saved[2] is not None:
            weights = GroupedMatrices(codes=saved[2], scale=saved[3], format=spec.weight.format)
    grad_input = None
    if spec.needs_grad_input:
        assert by_rows is not None and weights is not None
        out = spec.buffers.grad_input
        grad_input = product_of_rows(
            by_rows, weights, groups, spec.dtype, exact=spec.accumulation.grad_input, out=out
        )
        grad_input = grad_input if out is None else handed_out(grad_input)
    grad_weights: tuple[Tensor | None, ...] = (None,) * (1 if spec.stacked_weight else groups.count)
    if spec.needs_grad_weight:
        assert by_columns is not None and x_columns is not None
        grad_weights = _weight_gradients(by_columns, x_columns, groups, spec)
    return TogetherGradients(grad_input, grad_weights, grad_biases)


def _weight_gradients(
    dy: GroupedColumns, x: GroupedColumns, groups: Groups, spec: TogetherSpec
) -> tuple[Tensor | None, ...]:
    """dw_e [N, K] = dy_e.T @ x_e: views of one stack, or accumulated into every main_grad."""
    n, k = spec.extents
    exact = spec.accumulation.grad_weight
    fused = spec.weight_gradients
    if fused is None:
        stack = torch.empty(groups.count, n, k, dtype=spec.weight_dtype, device=dy.codes.device)
        product_of_columns(dy, x, groups, (n, k), stack, exact=exact)
        return (stack,) if spec.stacked_weight else stack.unbind(0)
    results = [main_grad_of(gradient.parameter) for gradient in fused]
    overwritten = [
        gradient.overwrite or getattr(gradient.parameter, "overwrite_main_grad", False) for gradient in fused
    ]
    overwrite = all(overwritten)
    if not overwrite:
        for result, starts_anew in zip(results, overwritten, strict=True):
            if starts_anew:
                result.zero_()
    if irregular(results) is None:
        product_of_columns(dy, x, groups, (n, k), results, accumulate=not overwrite, exact=exact)
    else:
        stack = torch.empty(groups.count, n, k, dtype=results[0].dtype, device=dy.codes.device)
        product_of_columns(dy, x, groups, (n, k), stack, exact=exact)
        for result, gradient in zip(results, stack.unbind(0), strict=True):
            result.copy_(gradient) if overwrite else result.add_(gradient)
    if spec.stacked_weight:
        return (stacked_gradient((), fused[0]),)
    return tuple(gradient._placeholder(spec.weight_dtype) for gradient in fused)


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, groups, spec, count, *parameters):
        y, saved = _forward(x, list(parameters[:count]), list(parameters[count:]) or None, groups, spec)
        ctx.save_for_backward(groups.layout, *saved)
        ctx.groups, ctx.spec = (groups.count, groups.total, groups.rows, groups.padded), spec
        ctx.scale_update = spec.scale_update
        ctx.more = len(parameters) - count
        return y

    @staticmethod
    @backward_of("GroupedLinear")
    def backward(ctx, grad_output):  # pyright: ignore[reportIncompatibleMethodOverride]
        layout, *saved = ctx.saved_tensors
        count, total, rows, padded = ctx.groups
        groups = Groups(count, total, rows, layout, padded)
        grads = _backward(grad_output, tuple(saved), groups, ctx.spec)
        biases = grads.biases or (None,) * ctx.more
        return grads.input, None, None, None, *grads.weights, *biases


_apply = applier(_Together)
