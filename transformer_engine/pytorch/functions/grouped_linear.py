"""y_g [M_g, N] = x_g [M_g, K] @ w_g [N, K].T + b_g [N] for consecutive groups g of rows, as one autograd node.

**Groups.** In a mixture of experts, each group is an expert. x [M, K] contains the M_g tokens of each expert, one
expert after another, and each expert has a weight w_g and a bias b_g. The row counts M_g change from call to
call; their sum is M. A group without rows has an empty y_g and dx_g, and a zero dw_g.

**Products.** The three products of a linear layer are computed for each group:

| product of each group | contracts | reads |
| --- | --- | --- |
| y_g [M_g, N] = x_g [M_g, K] @ w_g [N, K].T + b_g [N] | K | row-wise x_g, row-wise w_g |
| dx_g [M_g, K] = dy_g [M_g, N] @ w_g [N, K] | N | row-wise dy_g, column-wise w_g |
| dw_g [N, K] = dy_g [M_g, N].T @ x_g [M_g, K] | M_g | column-wise dy_g, column-wise x_g |

`linear.py` explains quantization and the terms row-wise and column-wise. Each group has its own quantizers:
the codes of a group equal those that a separate `Linear` computes. The passes below follow `linear.py`,
without communication. A quantizer computes two operands, one per direction. Unquantized values serve as
both operands: the products for dx_g and dw_g read them as transposed matrices.

**Launches.** Each step in a pass is a function in `grouped_products.py`. It computes all groups in one
launch, or in a loop over the groups, as `grouped_request.py` chooses. In one launch, a quantized operand is
one object for all groups; in a loop, it is a list with one operand per group. Unquantized x and dy remain one
tensor in both cases, which the step splits into groups. The functions below do not depend on this choice.

**Settings.** A `GroupedCall` has the row counts of one call and its `GroupedSpec`. It also has the
attributes of a `LayerSpec`, so that `layer.py` accepts it as the spec. `call.spec.layer` has the
settings that all groups share; its `needs_grad_*` are set if some group needs that gradient.

**Parameters.** The weights are a list with n tensors [N, K], or one stack [n, N, K]; the biases a
list with tensors [N], or one stack [n, N]. Gradients have the form of their parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..offload.marks import active as offloading
from ..offload.marks import keep_weight, mark_ready
from ..runtime.autograd import Function
from ..runtime.double_backward import once_differentiable
from .caller_buffers import copy_if_overlapping
from .grouped_call import GroupedCall
from .grouped_products import (
    bias_gradients,
    cast_groups,
    convert_weights,
    inspect_groups,
    operands_of_trained_weights,
    product_of_groups,
    values_of_groups,
    weight_gradients,
)
from .layer import LayerFunctions, run_and_save, run_backward, run_without_saving
from .linear_operands import dense_values
from .linear_spec import DEQUANTIZED, HIGH_PRECISION, QUANTIZED
from .saving import wait_for_saved


def grouped_linear_forward(
    x: Tensor,
    weights: Any,
    biases: Any,
    call: GroupedCall,
    saves: bool = True,
    compute_y: bool = True,
) -> tuple[Any, Any, Any]:
    """Compute y_g [M_g, N] = x_g [M_g, K] @ w_g [N, K].T + b_g [N] for each group g.

    Args:
        x: Tensor [M, K].
        weights: A list or one stack.
        biases: A list or one stack; None without biases.
        call: Settings and row counts for this call.
        saves: Return the saved operands. False in a compiled graph (`grouped_operators.py`), which runs the
            function again in its backward pass, with `saves=True` and `compute_y=False`.
        compute_y: Compute y; otherwise the saved operands only.

    Returns:
        (y [M, N] or None; x in the form saved for dw; weights in the form saved for dx); None for one
        whose gradient is not needed.
    """
    x_rows, saved_input = _quantize_input(x, call, saves)
    w_rows, saved_weight = _quantize_weights(weights, call, saves)
    y = None
    if compute_y:
        # y_g [M_g, N] = x_g [M_g, K] @ w_g [N, K].T + b_g [N]: both row-wise; the rows of all groups form y [M, N].
        y = product_of_groups(x_rows, w_rows, call, "forward", biases=biases)
        if "output" in call.spec.inspected:
            y = inspect_groups(y, call, "output")
    return y, saved_input, saved_weight


def _quantize_input(x: Tensor, call: GroupedCall, saves: bool) -> tuple[Any, Any]:
    """Quantize x_g [M_g, K] for each group: row-wise for y_g, column-wise for dw_g.

    Returns:
        (operand for y; operand saved for dw, or None if dw is not needed). By default the saved operand is
        the column-wise codes per group. It is the values of x with `keep_input`, for HIGH_PRECISION and in an
        unquantized layer. For DEQUANTIZED it is the row-wise codes for groups whose weights need a gradient.
    """
    layer = call.spec.layer
    rows: Any
    columns: Any
    if layer.is_unquantized:
        rows = columns = x
    else:
        # One kernel reads x once for both directions.
        quantizes_columns = (
            layer.needs_grad_weight
            and layer.backward_operands == QUANTIZED
            and not layer.keep_input
        )
        rows, columns = cast_groups(x, call, "input", rowwise=True, columnwise=quantizes_columns)
    if not (saves and layer.needs_grad_weight):
        return rows, None
    saved = columns
    if layer.keep_input or layer.backward_operands == HIGH_PRECISION:
        saved = values_of_groups(x, call)
    elif layer.backward_operands == DEQUANTIZED and not layer.is_unquantized:
        saved = operands_of_trained_weights(rows, call)
    if offloading.synchronizer is not None and saved is not x:
        mark_ready(saved)  # an offloading context may begin to copy it to the host
    return rows, saved


def _quantize_weights(weights: Any, call: GroupedCall, saves: bool) -> tuple[Any, Any]:
    """Quantize w_g [N, K] for each group: row-wise for y_g, column-wise for dx_g.

    Returns:
        (operand for y; operand saved for dx, or None if dx is not needed). By default the saved
        operand is the column-wise codes per weight. It is the values for HIGH_PRECISION and in an
        unquantized layer, and the row-wise codes for DEQUANTIZED.
    """
    layer = call.spec.layer
    if layer.is_unquantized:
        rows = columns = convert_weights(weights, call)
    else:
        quantizes_columns = layer.needs_grad_input and layer.backward_operands == QUANTIZED
        rows, columns = cast_groups(
            weights, call, "weight", rowwise=True, columnwise=quantizes_columns
        )
    if not (saves and layer.needs_grad_input):
        return rows, None
    saved = columns
    if layer.backward_operands == DEQUANTIZED:
        saved = rows
    elif layer.backward_operands == HIGH_PRECISION and not layer.is_unquantized:
        saved = convert_weights(weights, call)
    if offloading.synchronizer is not None:
        keep_weight(saved)  # an offloading context leaves weights on the device
    return rows, saved


def grouped_linear_backward(operands: list[Any], call: GroupedCall) -> list[Any]:
    """Compute dx_g [M_g, K] = dy_g [M_g, N] @ w_g [N, K], dw_g [N, K] = dy_g.T @ x_g, and db_g [N] for each group g.

    Args:
        operands: dy [M, N], and the saved x and weight operands. The list is emptied, so that each
            saved buffer and the codes of dy are freed after their last reader.
        call: Settings and row counts of the forward pass.

    Returns:
        [dx [M, K], weight gradients, bias gradients]; None for a gradient that is not needed.
    """
    dy, x, w = operands
    operands.clear()
    layer = call.spec.layer
    dy = dense_values(dy)
    # db_g [N] = sum of dy_g [M_g, N] over M_g.
    db = (
        bias_gradients(dy, call, layer.grad_bias_dtype or layer.dtype)
        if layer.needs_grad_bias
        else None
    )
    rows = columns = dy
    quantizes = layer.backward_operands == QUANTIZED and not layer.is_unquantized
    if quantizes and (layer.needs_grad_input or layer.needs_grad_weight):
        # dy_g [M_g, N] row-wise for dx_g, and column-wise [N, M_g] for dw_g.
        rows, columns = cast_groups(
            dy,
            call,
            "grad_output",
            rowwise=layer.needs_grad_input,
            columnwise=layer.needs_grad_weight,
        )
    del dy
    dx = None
    if layer.needs_grad_input:
        if offloading.used:
            wait_for_saved(w)
        if layer.backward_operands == DEQUANTIZED and not layer.is_unquantized:
            w = values_of_groups(w, call)
        # dx_g [M_g, K] = dy_g [M_g, N] @ w_g [N, K]: dy_g row-wise, w_g column-wise.
        dx = product_of_groups(rows, w, call, "grad_input")
        if "grad_input" in call.spec.inspected:
            dx = inspect_groups(dx, call, "grad_input")
    del rows, w
    dw = None
    if layer.needs_grad_weight:
        if offloading.used or layer.keep_input or layer.backward_operands != QUANTIZED:
            x = _column_operand(x, call)
        # dw_g [N, K] = dy_g [M_g, N].T @ x_g [M_g, K]: both column-wise. It is returned, accumulated into main_grad, or
        # delayed.
        dw = weight_gradients(columns, x, call, layer.grad_weight_dtype or layer.dtype)
    return [dx, dw, db]


def _column_operand(x: Any, call: GroupedCall) -> Any:
    """Return the operand that dw_g reads.

    It is the saved operand, except in two cases: values saved by `keep_input` are quantized now, and row-wise codes
    are dequantized if the backward pass multiplies values.
    """
    layer = call.spec.layer
    if offloading.used:
        wait_for_saved(x)
    if layer.keep_input and layer.backward_operands == QUANTIZED and not layer.is_unquantized:
        return cast_groups(x, call, "input", rowwise=False, columnwise=True)[1]
    if layer.backward_operands == DEQUANTIZED and not (layer.keep_input or layer.is_unquantized):
        return values_of_groups(x, call)
    return x


GROUPED_LINEAR_FUNCTIONS = LayerFunctions(
    "GroupedLinear", grouped_linear_forward, grouped_linear_backward, num_results=1, num_gradients=1
)


def grouped_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None, call: GroupedCall
) -> Tensor:
    """Compute y [M, N] from x [M, K], differentiable in x, every weight and every bias.

    Args:
        x: The rows of all groups.
        weights: Weight [N, K] per group, or one stack [n, N, K] as the only element.
        biases: Bias [N] per group, or one stack [n, N] as the only element; None to add none.
        call: Settings and row counts for this call.
    """
    if call.spec.needs_grad:
        return _GroupedLinear.apply(x, call, len(weights), *weights, *(biases or ()))
    tensors = group_tensors(x, weights, biases, call)
    return run_without_saving(GROUPED_LINEAR_FUNCTIONS, call, tensors)[0]  # pyright: ignore[reportArgumentType]


def group_tensors(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] | None, call: GroupedCall
) -> tuple[Any, Any, Any]:
    """Return x, the weights and the biases as `grouped_linear_forward` takes them: each a list or one stack."""
    spec = call.spec
    bias = None if not biases else biases[0] if spec.stacked_bias else list(biases)
    return x, weights[0] if spec.stacked_weight else list(weights), bias


def separate_gradients(gradients: Sequence[Any], counts: Sequence[int]) -> list[Tensor | None]:
    """Gradient per parameter, from the weight and bias gradients: each a list, a stack's, or None for all.

    Args:
        gradients: Weight gradients and bias gradients.
        counts: Weight and bias parameter counts.
    """
    separate: list[Tensor | None] = []
    for gradient, count in zip(gradients, counts, strict=True):
        if isinstance(gradient, list):
            separate += gradient
        else:  # a stack is a single parameter
            separate += [gradient] * count
    return separate


class _GroupedLinear(Function):
    """Node in autograd's graph, which takes each parameter as a separate argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: GroupedCall, count: int, *parameters: Tensor) -> Any:
        weights, biases = parameters[:count], parameters[count:]
        ctx.counts = (count, len(biases))
        return run_and_save(
            GROUPED_LINEAR_FUNCTIONS,
            ctx,
            call,  # pyright: ignore[reportArgumentType]
            group_tensors(x, weights, biases, call),
        )[0]

    @staticmethod
    @once_differentiable("GroupedLinear")
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        call: GroupedCall = ctx.spec
        buffer = call.buffers.grad_input
        if buffer is not None:  # the caller's buffer for dx, which may share memory with dy
            grad_output = copy_if_overlapping(grad_output, buffer)
        grad_input, *parameter_gradients = run_backward(
            GROUPED_LINEAR_FUNCTIONS, ctx, (grad_output,)
        )
        grads = separate_gradients(parameter_gradients, ctx.counts)
        return grad_input, None, None, *grads  # no gradients for call and count
