"""y_g [M_g, N] = x_g [M_g, K] @ w_g [N, K].T + b_g for consecutive groups of rows g, differentiable, in one node.

Groups are the experts of a mixture: x [M, K] contains the M_g tokens of each expert g one after another, and each
expert has a weight. The three products of `linear.py` become three products per group:

| product of each group | contracts | reads |
| --- | --- | --- |
| y_g [M_g, N] = x_g [M_g, K] @ w_g [N, K].T + b_g [N] | K | x_g by rows, w_g by rows |
| dx_g [M_g, K] = dy_g [M_g, N] @ w_g [N, K] | N | dy_g by rows, w_g by columns |
| dw_g [N, K] = dy_g [M_g, N].T @ x_g [M_g, K] | M_g | dy_g by columns, x_g by columns |

The passes are those of `linear.py` without communication, on the operations of `grouped_products.py`: one launch for
all groups, or a loop over them. Each group has its own quantizers, so that a group's codes are those of a separate
`Linear`. A group without rows has an empty y_g and dx_g, and a dw_g of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..offload.marks import active as offloading
from ..offload.marks import keep_weight, mark_ready
from ..runtime.autograd import Function
from .caller_buffers import readable
from .grouped_call import GroupedCall
from .grouped_products import (
    bias_gradients,
    cast_groups,
    converted_weights,
    dequantized_groups,
    inspected_groups,
    product_of_groups,
    trained_groups,
    weight_gradients,
)
from .layer import LayerFunctions, record, run_backward, run_without_saving
from .linear_operands import dense_values
from .linear_spec import DEQUANTIZED, HIGH_PRECISION, QUANTIZED, Dtypes
from .saving import backward_of, wait_for_saved


def grouped_linear_forward(
    tensors: Sequence[Any],
    call: GroupedCall,
    saves: bool,
    leading: tuple[int, ...] = (),
    compute_output: bool = True,
) -> tuple[list[Any], list[Any]]:
    """Compute y_g [M_g, N] = x_g [M_g, K] @ w_g [N, K].T + b_g [N] of each group g.

    Args:
        tensors: x [M, K]; the weights and the biases, each a list of one per group or one stack; None without biases.
        call: Settings.
        saves: A backward pass follows.
        leading: Not used: x is a matrix.
        compute_output: Compute y. Recomputation needs the other results only.

    Returns:
        [y [M, N] or None]; and the saved values: x for dw_g, and the weights for dx.
    """
    x, weights, biases = tensors
    layer = call.spec.layer
    # x_g [M_g, K] by rows for y_g, and by columns [K, M_g] for dw_g: one kernel reads x once for both. Unquantized
    # values serve both directions. Where the values are saved, the backward pass makes the columns.
    columns = layer.needs_grad_weight and layer.backward == QUANTIZED and not layer.keep_input
    x_rows, x_columns = (x, x) if layer.plain else cast_groups(x, call, "input", True, columns)
    saved_input = x_rows if layer.backward == DEQUANTIZED else x_columns
    if layer.keep_input or layer.backward == HIGH_PRECISION:
        saved_input = dequantized_groups(x, call) if saves and layer.needs_grad_weight else None
    elif saves and layer.backward == DEQUANTIZED and not layer.plain and layer.needs_grad_weight:
        saved_input = trained_groups(x_rows, call)
    del x_columns
    # w_g [N, K] by rows for y_g, and by columns [K, N] for dx_g.
    if layer.plain:
        w_rows = w_columns = converted_weights(weights, call)
    else:
        columns = layer.needs_grad_input and layer.backward == QUANTIZED
        w_rows, w_columns = cast_groups(weights, call, "weight", True, columns)
    saved_weight = w_rows if layer.backward == DEQUANTIZED else w_columns
    del w_columns
    y = None
    if compute_output:
        # y_g [M_g, N] = x_g [M_g, K] @ w_g [N, K].T + b_g [N]: both by rows; the rows of all groups form y [M, N].
        y = product_of_groups(x_rows, w_rows, call, "forward", biases=biases)
        if "output" in call.spec.inspected:
            y = inspected_groups(y, call, "output")
    del x_rows
    if layer.backward == HIGH_PRECISION and saves and layer.needs_grad_input:
        saved_weight = converted_weights(w_rows if layer.plain else weights, call)
    saved = [
        saved_input if layer.needs_grad_weight else None,
        saved_weight if layer.needs_grad_input else None,
    ]
    if saves and offloading.synchronizer is not None:
        if saved[0] is not x:
            mark_ready(saved[0])
        keep_weight(saved[1])
    return [y], saved


def grouped_linear_backward(
    operands: list[Any], call: GroupedCall, dtypes: Dtypes, leading: tuple[int, ...] = ()
) -> list[Any]:
    """Compute dx_g [M_g, K] = dy_g [M_g, N] @ w_g [N, K], dw_g [N, K] = dy_g.T @ x_g, and db_g [N] of each group g.

    Args:
        operands: dy [M, N], and the two saved values of x and the weights. The list is emptied.
        call: Settings.
        dtypes: Dtypes of the gradients of a weight and a bias.
        leading: Not used: x is a matrix.

    Returns:
        [dx [M, K], gradients of the weights, gradients of the biases].
    """
    dy, x, w = operands
    operands.clear()
    layer = call.spec.layer
    (weight_dtype, bias_dtype), *_ = dtypes
    # Unquantized matrices are read without conversion by rows, and as their transpose by columns.
    unquantized = layer.plain or layer.backward != QUANTIZED
    if type(dy) is not Tensor or not dy.is_contiguous():
        dy = dense_values(dy)
    # db_g [N] = sum of dy_g [M_g, N] over M_g.
    db = bias_gradients(dy, call, bias_dtype) if layer.needs_grad_bias else None
    # dy_g [M_g, N] by rows for dx_g, and by columns [N, M_g] for dw_g.
    rows = columns = dy
    if not unquantized and (layer.needs_grad_input or layer.needs_grad_weight):
        needs = layer.needs_grad_input, layer.needs_grad_weight
        rows, columns = cast_groups(dy, call, "grad_output", *needs)
    del dy
    dx = None
    if layer.needs_grad_input:
        if offloading.used:
            wait_for_saved(w)
        if layer.backward == DEQUANTIZED and not layer.plain:
            w = dequantized_groups(w, call)
        # dx_g [M_g, K] = dy_g [M_g, N] @ w_g [N, K]: dy_g by rows, w_g by columns.
        dx = product_of_groups(rows, w, call, "grad_input", transposed=unquantized)
        if "grad_input" in call.spec.inspected:
            dx = inspected_groups(dx, call, "grad_input")
    del rows, w
    dw = None
    if layer.needs_grad_weight:
        if offloading.used:
            wait_for_saved(x)
        saved_unquantized = layer.plain or layer.keep_input or layer.backward == HIGH_PRECISION
        if layer.backward != QUANTIZED and not saved_unquantized:
            x = dequantized_groups(x, call)
        elif layer.backward == QUANTIZED and layer.keep_input and not layer.plain:
            x = cast_groups(x, call, "input", False, True)[1]
        # dw_g [N, K] = dy_g [M_g, N].T @ x_g [M_g, K]: both by columns. It is returned, accumulated into main_grad, or
        # delayed.
        dw = weight_gradients(columns, x, call, weight_dtype, (unquantized, unquantized))
    return [dx, dw, db]


FUNCTIONS = LayerFunctions("GroupedLinear", grouped_linear_forward, grouped_linear_backward, results=1)


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
        return _GroupedLinear.apply(x, call, len(weights), *weights, *(biases or ()))
    spec = call.spec
    bias = None if not biases else biases[0] if spec.stacked_bias else list(biases)
    tensors = (x, weights[0] if spec.stacked_weight else list(weights), bias)
    return run_without_saving(FUNCTIONS, call, tensors)[0]  # pyright: ignore[reportArgumentType]


class _GroupedLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: GroupedCall, count: int, *parameters: Tensor) -> Any:
        weights, biases = parameters[:count], parameters[count:]
        ctx.counts = (count, len(biases))
        dtypes = (weights[0].dtype, (biases or weights)[0].dtype)
        spec = call.spec
        bias = None if not biases else biases[0] if spec.stacked_bias else list(biases)
        tensors = (x, weights[0] if spec.stacked_weight else list(weights), bias)
        return record(FUNCTIONS, ctx, call, tensors, (dtypes,))[0]  # pyright: ignore[reportArgumentType]

    @staticmethod
    @backward_of("GroupedLinear")
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        call: GroupedCall = ctx.spec
        buffer = call.buffers.grad_input
        if buffer is not None:
            grad_output = readable(grad_output, buffer)
        grad_input, *parameter_gradients = run_backward(FUNCTIONS, ctx, (grad_output,))
        grads: list[Tensor | None] = []
        for gradient, count in zip(parameter_gradients, ctx.counts, strict=True):
            if isinstance(gradient, list):
                grads += gradient
            else:
                grads += (gradient,) if count == 1 else (None,) * count
        return grad_input, None, None, *grads
