"""y [.., N] = x [.., K] @ weight [N, K].T + bias [N], differentiable, in FP8 or another quantized format.

Read this page, then `linear_forward` and `linear_backward`, which compute each product below its equation. The next
file is `linear_operands.py`, which turns a matrix into codes.

**Products.** Training a linear layer takes three matrix products, one in the forward and two in the backward
pass. M is the number of rows of x: the product of all its dimensions but the last. dy, dx, dw and db are the
gradients of the loss with respect to y, x, weight and bias. `multiply(a, b, epilogue)` computes a @ b.T, so each
product contracts the last axis of both its operands. A matrix whose own last axis is contracted is read row-wise;
otherwise its transpose is read, column-wise:

| product | contracts | reads |
| --- | --- | --- |
| y [M, N] = x [M, K] @ weight [N, K].T + bias | K | row-wise x, row-wise weight |
| dx [M, K] = dy [M, N] @ weight [N, K] | N | row-wise dy, column-wise weight |
| dw [N, K] = dy [M, N].T @ x [M, K] | M | column-wise dy, column-wise x |

**Quantization.** FP8 represents a matrix by 8-bit codes and a scale: x = codes * scale. The format
E4M3 has codes up to 448; E5M2 has codes up to 57,344 and one bit less precision. Values are
multiplied before they are rounded, so that they use this range. With per-tensor scaling, a matrix
has one float32 scale. Current scaling derives the multiplier from the matrix itself:

    amax = max(|x|)
    multiplier = 448 / amax
    codes = round_to_fp8(x * multiplier)
    scale = 1 / multiplier

With per-tensor scaling, x and weight are by default E4M3, and dy, whose values vary more, is E5M2. Block formats have
one scale per block, which is 16 to 128 elements long, and by default all three matrices have the same format. The
dtype of their scales differs: powers of two (E8M0) in MXFP8, E4M3 in NVFP4, whose codes have 4 bits.

A product multiplies codes, which GPUs do twice as fast as with bfloat16 values, sums the results in float32, and
applies both scales:

    x @ weight.T = (x_codes @ weight_codes.T) * (x_scale * weight_scale)

On Hopper the sums of FP8 products have about 14 bits, unless `spec.accumulation` requests float32.

y and dx have the dtype `spec.dtype`, unless the caller requests them quantized. Parameters are in high precision,
unless the caller created them quantized. MXFP8 requires that M, N and K are multiples of 32, NVFP4 of 16; for other
shapes the layer runs unquantized and warns (`precision.py`). The other formats support every shape.

**Directions.** A product can apply scales only if each scale covers the whole contracted axis or a block of
it. x, weight and dy are each read by two products, which contract different axes. Each matrix is therefore
quantized in two directions: row-wise, [M, K] with scales along K, and column-wise, the transposed matrix
[K, M] with scales along M. One kernel computes both directions. A scale per tensor is valid for both
directions, but Hopper's FP8 products read codes along the contracted axis only, so that the transposed codes
are still written. On GPUs whose products read codes along either axis (`reads_all_layouts`), they are not.

An `Operand` contains the codes and scales for one direction, and `Operands` is the pair (row-wise, column-wise) of one
matrix. Unquantized values serve both directions without a copy: row-wise the tensor itself, column-wise a `Matrix` of
it, which a product reads transposed.

**Saved operands.** The forward pass multiplies the row-wise operands and saves the column-wise
ones, which the backward pass reads. FP8 codes take half the memory that bfloat16 values take.
`LinearSpec` has five exceptions:

| setting | saved | the backward pass |
| --- | --- | --- |
| `keep_input` | values of x | quantizes them again |
| `backward` is HIGH_PRECISION | values of x and weight | multiplies these values |
| `backward` is DEQUANTIZED | row-wise codes | multiplies the dequantized codes |
| `input_columns` is not SAVED | values of x, and their multiplier or amax | casts the columns (`deferred_columns.py`) |
| `weight_columns` is not SAVED | the weight, and its multiplier or amax | casts the columns |

**Delayed scaling** takes amax from earlier calls. Each cast records its maximum in the amax history of its
quantizer (`tensor/delayed_scale.py`). The multipliers are updated later: for x and weight when the outermost
enabled `autocast` block ends; for dy when the backward pass through the whole graph ends, for which `run_backward`
(`layer.py`) queues a callback. An evaluation updates nothing: the update for x and weight is skipped if gradients are
disabled, except in the first run of a checkpointed call, whose second run records gradients. `quantizer.scale` is
the multiplier, the inverse of the scale above. `quantization/delayed_scaling.py` computes it, and explains what
differs under torch.compile, where `spec.traced` is set. A multiplier that is updated between the passes does not change
the backward pass: saved codes have their own scale, deferred columns have the multiplier of the forward pass, and
`keep_input` is rejected under delayed scaling.

**Other files.** The functions in this file are complete for one device:

| file | content |
| --- | --- |
| `linear_operands.py` | applies quantizers (`tensor/quantizer.py`) to x, weight and dy |
| `linear_spec.py` | `LinearSpec`, all settings of a call |
| `layer.py` | runs the passes in autograd's nodes, and saves operands between them |
| `linear_results.py` | y and dx that are summed over ranks, inspected or returned quantized |
| `gathered_operands.py` | x and dy whose rows are sharded over ranks; each is `Pending` until it has arrived |
| `weight_gradient.py` | dw that is accumulated into a buffer of the caller, or delayed |

**Breakpoints.** Calls are of one kind if their shapes, dtypes and settings are equal. On a GPU,
`fast/compiled.py` compiles a pass in the second call of each kind: it runs the functions on symbols in
place of tensors and records the kernels that they launch. Later calls repeat these kernels, so a
print or a breakpoint in this file takes no effect from the third call on. The environment variable TE_FAST=0,
set before the import, disables compilation. Some calls always run these functions, for example under a forced
backend, and so do backward passes that accumulate into `main_grad` or delay the weight gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

# `offloading.synchronizer` is not None while this thread has an offloading context open, which copies saved tensors to
# the host. `offloading.used`: any thread has ever opened one, so a saved tensor may be on the host.
from ..offload.marks import active as offloading
from ..offload.marks import keep_weight
from ..primitives.column_sums import column_sums
from ..primitives.gemm import Epilogue, as_matrix, multiply
from ..runtime.autograd import Function
from ..runtime.double_backward import once_differentiable
from ..tensor.quantizer import Matrix, Operands
from .communication import Pending
from .deferred_columns import cast_rows, weight_column_operand
from .gathered_operands import (
    begin_gather_gradient,
    begin_gather_saved,
    gather_columns,
    gather_quantized_input,
    input_column_operand,
    saves_input_shard,
)
from .layer import LayerFunctions, run_and_save, run_backward, run_without_saving
from .linear_operands import (
    GradientOperands,
    cast_gradient,
    cast_input,
    converted,
    dense_values,
    gradient_cast,
    input_to_save,
    to_operand,
    weight_operands,
)
from .linear_results import begin_input_gradient, compute_output, end_input_gradient
from .linear_spec import DEQUANTIZED, QUANTIZED, RECOMPUTED, SAVED, LinearSpec


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> Tensor:
    """Compute y [.., N] = x [.., K] @ weight [N, K].T + bias [N], differentiable in all three tensors."""
    if spec.needs_grad:
        return _LinearNode.apply(x, weight, bias, spec)
    return run_without_saving(LINEAR_FUNCTIONS, spec, (x, weight, bias))[0]


class _LinearNode(Function):
    """Node in autograd's graph: `run_and_save` calls `linear_forward`, `run_backward` calls `linear_backward`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> Any:
        return run_and_save(LINEAR_FUNCTIONS, ctx, spec, (x, weight, bias))[0]

    @staticmethod
    @once_differentiable("Linear")
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return *run_backward(LINEAR_FUNCTIONS, ctx, (grad_output,)), None  # no gradient for spec


def linear_forward(
    x: Any,
    weight: Tensor,
    bias: Tensor | None,
    spec: LinearSpec,
    accumulate_into: Tensor | None = None,
) -> tuple[Any, Any, Any]:
    """Compute y [M, N] = x [M, K] @ weight [N, K].T + bias [N].

    Args:
        x: Tensor [.., K], or its `Operands` if the kernel that computed x has quantized it.
        weight: Weight [N, K] on this rank.
        bias: Bias [N], or None.
        spec: Quantizers, dtype, communication and required gradients for this call kind.
        accumulate_into: Matrix [M, N] into which y is accumulated in place; None to allocate y.

    Returns:
        (y [M, N]; x in the form that is saved for dw, or None if dw is not needed; the weight in the form that is
        saved for dx, or None if dx is not needed).
    """
    x_rows, saved_input = quantize_input(x, spec)
    w_rows, saved_weight = quantize_weight(weight, spec)
    epilogue = _epilogue(spec, bias, accumulate_into, exact=spec.accumulation.forward)
    y_is_product = not (spec.communicates or spec.inspector is not None or spec.output is not None)
    # y [M, N] = x [M, K] @ weight [N, K].T + bias [N]: x row-wise, the weight row-wise.
    if y_is_product:
        y = multiply(to_operand(x_rows), to_operand(w_rows), epilogue)
    else:  # y is summed over ranks, inspected or quantized
        operands = [x_rows, w_rows]
        del x_rows, w_rows  # the list has the last references, and is emptied by the product
        y = compute_output(operands, epilogue, spec)
    return y, saved_input, saved_weight


def quantize_input(x: Any, spec: LinearSpec) -> tuple[Any, Any]:
    """Quantize x [M, K]: row-wise for y, column-wise for dw.

    Returns:
        (operand for y, or a `Pending` gather of it; x in the form that is saved for dw, see "Saved operands" above).
        If the input is gathered, the saved form may be this rank's shard.
    """
    if spec.communicates and spec.parallel.gathers_input:
        return gather_quantized_input(x, spec)
    if spec.input_columns == RECOMPUTED:
        return cast_rows(x, spec.input)
    if isinstance(x, Operands):  # from the kernel that computed x
        x_rows, x_columns = x
    else:
        needs_columns = (
            spec.needs_grad_weight and spec.backward == QUANTIZED and not spec.keep_input
        )
        x_rows, x_columns = cast_input(x, spec, rowwise=True, columnwise=needs_columns)
    return x_rows, input_to_save(x, x_rows, x_columns, spec)


def quantize_weight(weight: Tensor, spec: LinearSpec) -> tuple[Any, Any]:
    """Quantize the weight [N, K]: row-wise for y, column-wise for dx. Codes of a quantized weight are reused.

    Returns:
        (operand for y; the weight in the form that is saved for dx, see "Saved operands" above).
    """
    if spec.weight_columns == RECOMPUTED:
        return cast_rows(weight, spec.weight)
    needs_columns = spec.needs_grad_input and spec.backward == QUANTIZED
    w_rows, w_columns = weight_operands(weight, spec, needs_columns)
    if not spec.needs_grad_input:
        return w_rows, None
    saved: Any = w_columns
    if spec.backward != QUANTIZED:
        saved = w_rows if spec.backward == DEQUANTIZED else Matrix(converted(weight, spec.dtype))
    if offloading.synchronizer is not None:
        keep_weight(saved)  # an offloading context leaves weights on the device
    return w_rows, saved


def linear_backward(
    operands: list[Any],
    spec: LinearSpec,
    accumulate_into: Tensor | None = None,
    produce_input: Callable[[Any], tuple[Any, Any]] | None = None,
) -> tuple[Any, Tensor | None, Tensor | None]:
    """Compute dx [M, K] = dy [M, N] @ weight [N, K], dw [N, K] = dy.T @ x [M, K], and db [N], the sum of dy over M.

    Each name is deleted where its buffer is read last, so that the memory is free for the next product.

    Args:
        operands: dy [.., N], or its `GradientOperands` if the kernel that computed dy has quantized it; then x and
            weight as `linear_forward` returned them. With a fourth value u [M, K], dx is multiplied by the GELU
            derivative at u in the epilogue of the product. The list is emptied, so that each saved buffer and the
            codes of dy are freed after their last reader. autograd holds dy itself until the node returns.
        spec: Quantizers, dtype, communication and required gradients for this call kind.
        accumulate_into: Matrix [M, K] into which dx is accumulated in place; None to allocate dx.
        produce_input: For layers that recompute x: function dx -> (value returned in place of dx, column-wise
            x). It receives dx because one kernel can compute both results: for x = act(u), the kernel that
            computes du from dx reads u and also writes the columns of x (`norm_mlp.py`).

    Returns:
        (dx, dw, db); None for a gradient that is not needed. dw is also None, or a placeholder, if it is delayed or
        accumulated into `weight.main_grad`, a buffer of the caller (`WeightGradient.compute`).
    """
    dy, x, weight = operands[:3]
    gelu_input = operands[3:]  # [u] or []; torch 2.11 would trace a starred target as a tuple
    operands.clear()
    if spec.communicates and saves_input_shard(spec):
        x = begin_gather_saved(x, spec)  # the rows of x are in transit while dx is computed
    # db [N] = sum of dy [M, N] over M; dy is quantized row-wise for dx and column-wise for dw.
    (dy_rows, dy_columns), db = prepare_gradient(dy, spec)
    del dy
    dx: Any = None
    if spec.needs_grad_input:
        # By default the saved form is the column-wise operand, which needs no call.
        if spec.backward == DEQUANTIZED or spec.weight_columns != SAVED or offloading.used:
            weight = weight_column_operand(weight, spec)
        epilogue = _epilogue(spec, None, accumulate_into, exact=spec.accumulation.grad_input)
        dx_is_product = not (
            spec.communicates or spec.inspector is not None or spec.grad_input is not None
        )
        # dx [M, K] = dy [M, N] @ weight [N, K]: dy row-wise, the weight column-wise.
        if dx_is_product and not gelu_input:
            dx = multiply(to_operand(dy_rows), to_operand(weight), epilogue)
            del weight
        else:
            product_operands = [dy_rows, weight, *gelu_input]
            del dy_rows, weight, gelu_input  # the list has the last references
            # dx may be a `Pending`: it is summed over the ranks while dw is computed, and awaited at the end.
            dx, dy_rows = begin_input_gradient(product_operands, epilogue, spec)
    if produce_input is not None:
        dx, x = produce_input(dx)
    if spec.communicates and spec.needs_grad_weight:
        dy_columns = gather_columns(dy_columns, dy_rows)
    del dy_rows
    dw = None
    if spec.needs_grad_weight:
        # By default the saved form is the column-wise operand, which needs no call.
        casts_again = spec.keep_input or spec.input_columns == RECOMPUTED
        if casts_again or spec.backward != QUANTIZED or spec.communicates or offloading.used:
            x = input_column_operand(x, spec)
        # dw [N, K] = dy [M, N].T @ x [M, K]: both column-wise. It is returned, accumulated into main_grad, or delayed.
        left, right = to_operand(dy_columns), to_operand(x)
        del dy_columns, x
        dw = spec.weight_gradient.compute(
            left,
            right,
            exact=spec.accumulation.grad_weight,
            dtype=spec.grad_weight_dtype or spec.dtype,
            inspector=spec.inspector,
        )
        del left, right
    if isinstance(dx, Pending):
        dx = end_input_gradient(dx, spec)
    return dx, dw, db


def prepare_gradient(dy: Any, spec: LinearSpec) -> GradientOperands:
    """Quantize dy [M, N] row-wise for dx and column-wise for dw, and compute db [N], the sum of dy over M."""
    if (
        spec.communicates
        and spec.parallel.gathers_gradient
        and not isinstance(dy, GradientOperands)
    ):
        dy = begin_gather_gradient(dy, spec)
    # from the kernel that computed dy, or from the other ranks
    if isinstance(dy, GradientOperands):
        return dy
    dy = dense_values(dy)  # the gradient of a sum, for example, is an expanded scalar
    db = None
    if spec.needs_grad_bias:
        dtype, cast = spec.grad_bias_dtype or spec.dtype, gradient_cast(spec)
        if cast is not None:
            # One kernel reads dy once, for its codes and for db. `cast` describes the quantization to this
            # kernel; `adopt` converts the codes to operands.
            codes, db = column_sums(as_matrix(dy), dtype, cast)
            return GradientOperands(spec.grad_output.adopt(codes, dy.dtype), db)
        db = column_sums(as_matrix(dy), dtype)
    operands = cast_gradient(dy, spec, spec.needs_grad_input, spec.needs_grad_weight)
    return GradientOperands(operands, db)


def _epilogue(
    spec: LinearSpec, bias: Tensor | None, accumulate_into: Tensor | None, exact: bool
) -> Epilogue:
    """Return the epilogue of a product: product + bias, or accumulate_into += product + bias.

    `exact`, a field in `spec.accumulation`, requests that the product promotes partial sums to float32, a "split
    accumulator". Hopper's FP8 products otherwise keep about 14 bits. The result is rounded in both cases.
    """
    if accumulate_into is None:
        return Epilogue(spec.dtype, bias=bias, exact=exact)
    return Epilogue(accumulate_into.dtype, bias, accumulate_into, accumulate=True, exact=exact)


LINEAR_FUNCTIONS = LayerFunctions(
    "Linear", linear_forward, linear_backward, num_results=1, num_gradients=1
)
