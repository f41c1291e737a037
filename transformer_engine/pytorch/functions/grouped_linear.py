"""y_g [M_g, N] = x_g [M_g, K] @ w_g [N, K].T + b_g for consecutive groups of rows, differentiable, in one node.

The passes are those of a linear layer over groups (`common/passes/linear.py`); the functions of their steps join the
table of `steps.py`. If `GroupedCall.layout` is given, a step is one launch for all groups, and the buffers hold
operands of `primitives/grouped_gemm`. Otherwise it loops over the groups, buffers hold lists of one value per group,
and results have the bits of a loop of linear layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...common.passes.vocabulary import CastSettings, ColumnSum, Inspection, Layer, Product
from ..offload.marks import active as offloading
from ..offload.marks import mark_ready
from ..primitives.column_sums import column_sums
from ..primitives.gemm import Epilogue, gemm
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
from ..primitives.grouped_quantize import row_sums
from ..runtime.autograd import Function, applier
from ..tensor.quantized_tensor import QuantizedTensorStorage
from .caller_buffers import handed_out, readable
from .grouped_call import GroupedCall, GroupedSpec, members_of, stacked_gradient
from .layer import backward_of_layer, forward_of, infer
from .linear_operands import input_operands, operands_for_products, weight_operands
from .linear_spec import LINEAR, Environment
from .main_grad import main_grad_of
from .run import run
from .saving import backward_of, keep, pack, take_saved_before_transfer, unpack
from .steps import OPERATIONS, operand_of
from .weight_gradient import WeightGradient, overwrite_once


def grouped_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None, call: GroupedCall
) -> Tensor:
    """Compute y [sum M_g, N] of x [sum M_g, K], differentiable in x, every weight and every bias.

    Args:
        x: The rows of all groups.
        weights: Weight [N, K] of each group, or one stack [n, N, K].
        biases: Bias [N] of each group, or one stack [n, N]; None to add none.
        call: The settings.
    """
    if call.spec.needs_grad:
        return _apply(x, call, len(weights), *weights, *(biases or ()))
    return infer("GroupedLinear", call, _inputs(call.spec, x, weights, biases))[0]  # pyright: ignore[reportArgumentType]


def _inputs(
    spec: GroupedSpec, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None
) -> tuple[Any, Any, Any]:
    """Return the inputs of the forward pass: one buffer of all weights, and one of all biases."""
    bias = None if not biases else biases[0] if spec.stacked_bias else list(biases)
    return x, weights[0] if spec.stacked_weight else list(weights), bias


class _GroupedLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: GroupedCall, count: int, *parameters: Tensor) -> Any:
        weights, biases = parameters[:count], parameters[count:]
        ctx.counts = (count, len(biases))
        dtypes = (weights[0].dtype, (biases or weights)[0].dtype)
        inputs = _inputs(call.spec, x, weights, biases)
        if torch.compiler.is_compiling():
            return forward_of(ctx, call, inputs, (dtypes,))[0]  # pyright: ignore[reportArgumentType]
        # The work of `forward_of`: neither are there compiled passes, nor dimensions in place of the rows.
        if offloading.synchronizer is not None:
            mark_ready(x)
        ctx.spec = call
        ctx.environment = environment = Environment({LINEAR: call}, {LINEAR: dtypes}, ())  # pyright: ignore
        given = [x, inputs[1]] if inputs[2] is None else [*inputs]
        results, saved = run(call.spec.passes.forward, environment, given)  # pyright: ignore
        tensors, ctx.forms = pack(*saved)
        keep(ctx, tensors)
        ctx.scale_update = call.spec.scale_update
        return results[0]

    @staticmethod
    @backward_of("GroupedLinear")
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        call: GroupedCall = ctx.spec
        buffer = call.buffers.grad_input
        if buffer is not None:
            grad_output = readable(grad_output, buffer)
        if torch.compiler.is_compiling():
            grad_input, *of_parameters = backward_of_layer(ctx, (grad_output,))
        else:
            given = [grad_output, *unpack(take_saved_before_transfer(ctx), ctx.forms)]
            results, _ = run(call.spec.passes.backward, ctx.environment, given)  # pyright: ignore
            grad_input, *of_parameters = results
        grads: list[Tensor | None] = []
        for gradient, count in zip(of_parameters, ctx.counts, strict=True):
            if isinstance(gradient, list):
                grads += gradient
            else:
                grads += (gradient,) if count == 1 else (None,) * count
        return grad_input, None, None, *grads


_apply = applier(_GroupedLinear)


def _cast(env: Environment, s: CastSettings, x: Any) -> tuple[Any, Any]:
    call: GroupedCall = env.linears[s.layer]  # pyright: ignore[reportAssignmentType]
    if call.layout is not None:
        quantizer: Any = getattr(call.spec.quantizers, s.tensor)
        if s.tensor == "weight":
            codes, scale, codes_t, scale_t = call.cached or quantizer.matrices(
                Matrices.of(members_of(x)), s.rowwise, s.columnwise
            )
            return (
                GroupedMatrices(codes=codes, scale=scale, format=quantizer.format) if s.rowwise else None,
                GroupedMatrices(codes=codes_t, scale=scale_t, format=quantizer.format)
                if s.columnwise
                else None,
            )
        codes, scale, codes_t, scale_t = quantizer.rows(x.contiguous(), call.layout, s.rowwise, s.columnwise)
        return (
            GroupedRows(codes, scale, quantizer.format) if s.rowwise else None,
            GroupedColumns(codes_t, scale_t, quantizer.format) if s.columnwise else None,
        )
    if s.tensor == "weight":
        members = zip(members_of(x), call.groups, strict=True)
        pairs = [weight_operands(weight, group, s.columnwise) for weight, group in members]
    else:
        pairs: list[Any] = []
        for part, group in zip(call.rows_of(x), call.groups, strict=True):
            columnwise = s.columnwise and group.needs_grad_weight
            if not (s.rowwise or columnwise):  # a frozen weight, and no gradient of the input
                pairs.append((None, None))
            elif s.tensor == "input" and s.rowwise:
                pairs.append(input_operands(part, group.input, columnwise))
            else:
                quantizer = group.input if s.tensor == "input" else group.grad_output
                pairs.append(operands_for_products(quantizer, part, s.rowwise, columnwise, False))
    return (
        [pair[0] for pair in pairs] if s.rowwise else None,
        [pair[1] for pair in pairs] if s.columnwise else None,
    )


def _convert(env: Environment, s: Layer, x: Any) -> tuple[Any]:
    call: GroupedCall = env.linears[s.layer]  # pyright: ignore[reportAssignmentType]
    dtype = call.groups[0].dtype
    if call.layout is not None and (x[0] if isinstance(x, list) else x).dtype is dtype:
        return (x,)  # one launch reads weights of the input's dtype only
    if isinstance(x, Tensor) and not isinstance(x, QuantizedTensorStorage):
        return (x.to(dtype),)
    return (
        [
            member.dequantize(dtype=dtype) if isinstance(member, QuantizedTensorStorage) else member.to(dtype)
            for member in members_of(x)
        ],
    )


def _dequantize(env: Environment, s: Layer, x: Any) -> tuple[Any]:
    single = OPERATIONS["dequantize"]
    if not isinstance(x, list):
        return single(env, s, x)
    return ([None if member is None else single(env, s, member)[0] for member in x],)


def _trained(env: Environment, s: Layer, codes: list[Any]) -> tuple[list[Any]]:
    """Return the input codes of groups whose weights get a gradient, and None for the others."""
    groups = env.linears[s.layer].groups  # pyright: ignore[reportAttributeAccessIssue]
    pairs = zip(codes, groups, strict=True)
    return ([part if group.needs_grad_weight else None for part, group in pairs],)


def _product(env: Environment, s: Product, a: Any, b: Any, bias: Any = None) -> tuple[Tensor]:
    call: GroupedCall = env.linears[s.layer]  # pyright: ignore[reportAssignmentType]
    buffer = call.buffers.output if s.kind == "forward" else call.buffers.grad_input
    first = call.groups[0]
    exact = getattr(first.accumulation, s.kind)
    if call.layout is None:
        dtype, (left_turned, right_turned) = first.dtype, s.turned
        epilogue = Epilogue(dtype, exact=exact)
        biases = [None] * len(call.groups) if bias is None else members_of(bias)
        parts = [
            gemm(
                operand_of(left, left_turned),
                operand_of(right, right_turned),
                epilogue if added is None else Epilogue(dtype, bias=added, exact=exact),
            )
            for left, right, added in zip(call.rows_of(a), members_of(b), biases, strict=True)
        ]
        y = call.joined(parts, buffer)
    else:
        rows = GroupedRows(a.contiguous()) if isinstance(a, Tensor) else a
        matrices = b
        if not isinstance(b, GroupedMatrices):
            matrices = GroupedMatrices(Matrices.of(members_of(b)), s.turned[1])
        stack = torch.stack(bias) if isinstance(bias, list) else bias
        y = product_of_rows(
            rows, matrices, call.layout, first.dtype, bias=stack, exact=exact, out=buffer, clears=call.clears
        )
    return (y if buffer is None else handed_out(y),)


def _weight_gradient(env: Environment, s: Product, dy: Any, x: Any) -> tuple[Any]:
    """Compute one gradient per group, or that of the stack."""
    call: GroupedCall = env.linears[s.layer]  # pyright: ignore[reportAssignmentType]
    dtype = env.dtypes[s.layer][0]
    if call.layout is not None:
        dy = GroupedColumns(dy.contiguous()) if isinstance(dy, Tensor) else dy
        x = GroupedColumns(x.contiguous()) if isinstance(x, Tensor) else x
        return (_stacked_weight_gradients(call, call.layout, dy, x, dtype),)
    if call.groups[0].weight_gradient.fused and not (
        call.spec.stacked_weight or torch.compiler.is_compiling()
    ):
        overwrite_once([group.weight_gradient for group in call.groups if group.needs_grad_weight])
    grads: list[Tensor | None] = []
    overwritten: list[Tensor] = []
    for left, right, group in zip(call.rows_of(dy), call.rows_of(x), call.groups, strict=True):
        gradient = None
        if group.needs_grad_weight:
            operands = operand_of(left, s.turned[0]), operand_of(right, s.turned[1])
            exact = group.accumulation.grad_weight
            destination = group.weight_gradient
            if destination.overwrite and destination.fused and torch.compiler.is_compiling():
                main_grad = main_grad_of(destination.parameter)
                if any(main_grad is other for other in overwritten):
                    destination = replace(destination, overwrite=False)
                overwritten.append(main_grad)
            gradient = destination.compute(*operands, exact, dtype, group.inspector)
        grads.append(gradient)
    if call.spec.stacked_weight:
        return (stacked_gradient(grads, call.groups[0].weight_gradient),)
    return (grads,)


def _inspect(env: Environment, s: Inspection, y: Tensor) -> tuple[Tensor]:
    """Pass each group's rows to the inspector of the group."""
    call: GroupedCall = env.linears[s.layer]  # pyright: ignore[reportAssignmentType]
    parts = []
    for part, group in zip(call.rows_of(y), call.groups, strict=True):
        inspected = group.inspector is not None and s.tensor in group.inspector.results
        parts.append(group.inspector.inspect(s.tensor, part) if inspected else part)  # pyright: ignore
    return (call.joined(parts),)


def _stacked_weight_gradients(
    call: GroupedCall, groups: Groups, dy: GroupedColumns, x: GroupedColumns, dtype: torch.dtype
) -> Any:
    """Compute dw_g [N, K] = dy_g.T @ x_g: views of one stack, or accumulated into every main_grad.

    A main_grad that several groups share receives the sum of their gradients.
    """
    exact = call.groups[0].accumulation.grad_weight
    n, k = call.spec.extents
    if not call.groups[0].weight_gradient.fused:
        stack = torch.empty(groups.count, n, k, dtype=dtype, device=dy.codes.device)
        product_of_columns(dy, x, groups, (n, k), stack, exact=exact)
        return stack if call.spec.stacked_weight else list(stack.unbind(0))
    gradients = [group.weight_gradient for group in call.groups]
    results = [main_grad_of(gradient.parameter) for gradient in gradients]
    overwritten = [gradient.begins_accumulation() for gradient in gradients]
    overwrite = all(overwritten)
    if not overwrite:
        for result, starts_anew in zip(results, overwritten, strict=True):
            if starts_anew:
                result.zero_()
    # A launch writes all results at once, so that groups with one main_grad would overwrite each other.
    separate = len({result.data_ptr() for result in results}) == len(results)
    if separate and irregular(results) is None:
        product_of_columns(dy, x, groups, (n, k), results, accumulate=not overwrite, exact=exact)
    else:
        stack = torch.empty(groups.count, n, k, dtype=results[0].dtype, device=dy.codes.device)
        product_of_columns(dy, x, groups, (n, k), stack, exact=exact)
        written: set[int] = set()
        for result, gradient in zip(results, stack.unbind(0), strict=True):
            first = overwrite and result.data_ptr() not in written
            result.copy_(gradient) if first else result.add_(gradient)
            written.add(result.data_ptr())
    if call.spec.stacked_weight:
        return stacked_gradient((), gradients[0])
    return [gradient._placeholder(dtype) for gradient in gradients]


def _column_sum(env: Environment, s: ColumnSum, x: Tensor) -> tuple[Any]:
    """Compute the gradient of each group's bias, or that of the stack."""
    call: GroupedCall = env.linears[s.layer]  # pyright: ignore[reportAssignmentType]
    dtype = env.dtypes[s.layer][1]
    if call.layout is not None:
        stack = row_sums(x.contiguous(), call.layout).to(dtype)
        return (stack if call.spec.stacked_bias else list(stack.unbind(0)),)
    parts = zip(call.rows_of(x), call.groups, strict=True)
    sums = [column_sums(part, dtype) if group.needs_grad_bias else None for part, group in parts]
    return (stacked_gradient(sums, WeightGradient()) if call.spec.stacked_bias else sums,)


OPERATIONS.update(
    grouped_cast=_cast,
    grouped_convert=_convert,
    grouped_inspect=_inspect,
    grouped_dequantize=_dequantize,
    grouped_product=_product,
    grouped_trained=_trained,
    grouped_weight_gradient=_weight_gradient,
    grouped_column_sum=_column_sum,
)
