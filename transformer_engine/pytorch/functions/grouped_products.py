"""Linear layer operations over consecutive row groups, each with a weight: casts, products and sums.

If `GroupedCall.layout` is given, an operation is one launch for all groups, on operands of
`primitives/grouped_gemm`. Otherwise it loops over the groups, operands are lists with one per
group, and results are bit-equal to a loop over linear layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..primitives.column_sums import column_sums
from ..primitives.gemm import Epilogue, multiply
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
from ..tensor.quantized_tensor import QuantizedTensorStorage
from .caller_buffers import alias_buffer
from .grouped_call import GroupedCall, stack_gradient, stack_members
from .linear_operands import (
    converted,
    dequantized,
    input_operands,
    product_operands,
    read_as,
    to_operand,
    weight_operands,
)
from .linear_spec import inspects
from .main_grad import find_main_grad
from .weight_gradient import WeightGradient, overwrite_once


def cast_groups(
    x: Any, call: GroupedCall, tensor: str, rowwise: bool, columnwise: bool
) -> tuple[Any, Any]:
    """Quantize x [M, K], dy [M, N] or the weights [N, K] in the requested directions.

    Args:
        x: The rows of all groups; or the weights, as a list or one stack.
        call: Settings.
        tensor: "input", "grad_output" or "weight".
        rowwise, columnwise: The directions.

    Returns:
        (row-wise operand, column-wise operand); None for a direction that was not requested.
    """
    layout = call.layout
    if layout is None:
        return _cast_each_group(x, call, tensor, rowwise, columnwise)
    quantizer: Any = getattr(call.spec.quantizers, tensor)
    if tensor == "weight":
        codes, scale, codes_t, scale_t, amax, amax_t = call.cached or quantizer.matrices(
            Matrices.of(stack_members(x)), rowwise, columnwise
        )
        return (
            GroupedMatrices(None, False, codes, scale, quantizer.format, amax) if rowwise else None,
            GroupedMatrices(None, False, codes_t, scale_t, quantizer.format, amax_t)
            if columnwise
            else None,
        )
    codes, scale, codes_t, scale_t, amax, amax_t = quantizer.rows(
        x.contiguous(), layout, rowwise, columnwise
    )
    return (
        GroupedRows(codes, scale, quantizer.format, amax) if rowwise else None,
        GroupedColumns(codes_t, scale_t, quantizer.format.columnwise, amax_t)
        if columnwise
        else None,
    )


def _cast_each_group(
    x: Any, call: GroupedCall, tensor: str, rowwise: bool, columnwise: bool
) -> tuple[Any, Any]:
    """`cast_groups` in a loop: each direction is a list with one operand per group."""
    if tensor == "weight":
        members = zip(stack_members(x), call.groups, strict=True)
        pairs = [weight_operands(weight, group, columnwise) for weight, group in members]
    else:
        pairs: list[Any] = []
        for part, group in zip(call.rows_of(x), call.groups, strict=True):
            columns = columnwise and group.needs_grad_weight
            if not (rowwise or columns):  # a frozen weight, and no input gradient
                pairs.append((None, None))
            elif tensor == "input" and rowwise:
                pairs.append(input_operands(part, group.input_quantizer, columns))
            else:
                quantizer = (
                    group.input_quantizer if tensor == "input" else group.grad_output_quantizer
                )
                pairs.append(product_operands(quantizer, part, rowwise, columns, split=False))
    return (
        [pair[0] for pair in pairs] if rowwise else None,
        [pair[1] for pair in pairs] if columnwise else None,
    )


def convert_weights(weights: Any, call: GroupedCall) -> Any:
    """Weight values in the layer dtype."""
    dtype = call.groups[0].dtype
    if (
        call.layout is not None
        and (weights[0] if isinstance(weights, list) else weights).dtype is dtype
    ):
        return weights  # one launch reads weights with the input's dtype only
    if isinstance(weights, Tensor) and not isinstance(weights, QuantizedTensorStorage):
        return weights.to(dtype)
    return [converted(member, dtype) for member in stack_members(weights)]


def values_of_groups(x: Any, call: GroupedCall) -> Any:
    """Values of a matrix in any form (tensor, quantized tensor), or per-group operand values; None stays None."""
    if not isinstance(x, list):
        return dequantized(x, call.dtype)
    return [None if member is None else dequantized(member, call.dtype) for member in x]


def operands_of_trained_weights(operands: list[Any], call: GroupedCall) -> list[Any]:
    """Operands for groups whose weights get a gradient, and None for the others."""
    pairs = zip(operands, call.groups, strict=True)
    return [part if group.needs_grad_weight else None for part, group in pairs]


def product_of_groups(a: Any, b: Any, call: GroupedCall, kind: str, biases: Any = None) -> Tensor:
    """Compute a_g [M_g, K] @ b_g [N, K].T + bias_g [N] for each group g, as one matrix [M, N].

    Args:
        a: Operand of the rows of all groups.
        b: Weight operand per group. Unquantized weights are transposed in a "grad_input" product.
        call: Settings.
        kind: "forward" or "grad_input", which choose accumulation and the caller's buffer.
        biases: A bias per group, or None.
    """
    buffer = call.buffers.output if kind == "forward" else call.buffers.grad_input
    first = call.groups[0]
    exact = getattr(first.accumulation, kind)
    transposed = kind == "grad_input"
    if call.layout is None:
        dtype = first.dtype
        epilogue = Epilogue(dtype, exact=exact)
        added = [None] * len(call.groups) if biases is None else stack_members(biases)
        parts = [
            multiply(
                to_operand(left),
                to_operand(read_as(right, transposed)),
                epilogue if bias is None else Epilogue(dtype, bias=bias, exact=exact),
            )
            for left, right, bias in zip(call.rows_of(a), stack_members(b), added, strict=True)
        ]
        y = call.joined(parts, buffer)
    else:
        rows = GroupedRows(a.contiguous()) if isinstance(a, Tensor) else a
        matrices = b
        if not isinstance(b, GroupedMatrices):
            matrices = GroupedMatrices(Matrices.of(stack_members(b)), transposed)
        stack = torch.stack(biases) if isinstance(biases, list) else biases
        y = product_of_rows(
            rows,
            matrices,
            call.layout,
            first.dtype,
            bias=stack,
            exact=exact,
            out=buffer,
            clears=call.clears,
        )
    return y if buffer is None else alias_buffer(y)


def inspect_groups(y: Tensor, call: GroupedCall, result: str) -> Tensor:
    """Pass each group's rows to the group's inspector."""
    parts = []
    for part, group in zip(call.rows_of(y), call.groups, strict=True):
        parts.append(group.inspector.inspect(result, part) if inspects(group, result) else part)  # pyright: ignore
    return call.joined(parts)


def weight_gradients(dy: Any, x: Any, call: GroupedCall, dtype: torch.dtype) -> Any:
    """Compute dw_g [N, K] = dy_g.T @ x_g for each group g: a list, or the stack gradient.

    Args:
        dy, x: Operands of the columns of all groups. Unquantized values are transposed.
        call: Settings.
        dtype: Gradient dtype.
    """
    if call.layout is not None:
        dy = GroupedColumns(dy.contiguous()) if isinstance(dy, Tensor) else dy
        x = GroupedColumns(x.contiguous()) if isinstance(x, Tensor) else x
        return stack_weight_gradients(call, call.layout, dy, x, dtype)
    # Groups may share one main_grad: its first gradient overwrites it, later ones are added. A compiler cannot trace
    # `overwrite_once`, so the loop below decides.
    if call.groups[0].weight_gradient.fused and not (
        call.spec.stacked_weight or torch.compiler.is_compiling()
    ):
        overwrite_once([group.weight_gradient for group in call.groups if group.needs_grad_weight])
    grads: list[Tensor | None] = []
    overwritten: list[Tensor] = []
    for left, right, group in zip(call.rows_of(dy), call.rows_of(x), call.groups, strict=True):
        gradient = None
        if group.needs_grad_weight:
            left = to_operand(read_as(left, transposed=True))
            right = to_operand(read_as(right, transposed=True))
            destination = group.weight_gradient
            if destination.overwrite and destination.fused and torch.compiler.is_compiling():
                main_grad = find_main_grad(destination.parameter)
                if any(main_grad is other for other in overwritten):
                    destination = replace(destination, overwrite=False)
                overwritten.append(main_grad)
            gradient = destination.compute(
                left, right, group.accumulation.grad_weight, dtype, group.inspector
            )
        grads.append(gradient)
    if call.spec.stacked_weight:
        return stack_gradient(grads, call.groups[0].weight_gradient)
    return grads


def stack_weight_gradients(
    call: GroupedCall, groups: Groups, dy: GroupedColumns, x: GroupedColumns, dtype: torch.dtype
) -> Any:
    """Compute dw_g [N, K] = dy_g.T @ x_g: views of one stack, or accumulated into every main_grad.

    A main_grad that several groups share receives their gradient sum.
    """
    exact = call.groups[0].accumulation.grad_weight
    n, k = call.spec.extents
    if not call.groups[0].weight_gradient.fused:
        stack = torch.empty(groups.count, n, k, dtype=dtype, device=dy.codes.device)
        product_of_columns(dy, x, groups, (n, k), stack, exact=exact)
        return stack if call.spec.stacked_weight else list(stack.unbind(0))
    gradients = [group.weight_gradient for group in call.groups]
    results = [find_main_grad(gradient.parameter) for gradient in gradients]
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
        return stack_gradient((), gradients[0])
    return [gradient._placeholder(dtype) for gradient in gradients]


def bias_gradients(dy: Tensor, call: GroupedCall, dtype: torch.dtype) -> Any:
    """Compute db_g [N], the sum of dy_g's rows, for each group g: a list, or the stack gradient."""
    if call.layout is not None:
        stack = row_sums(dy.contiguous(), call.layout).to(dtype)
        return stack if call.spec.stacked_bias else list(stack.unbind(0))
    parts = zip(call.rows_of(dy), call.groups, strict=True)
    sums = [column_sums(part, dtype) if group.needs_grad_bias else None for part, group in parts]
    return stack_gradient(sums, WeightGradient()) if call.spec.stacked_bias else sums
