"""y [.., N] = x [.., K] @ weight [N, K].T + bias [N], differentiable, in FP8 or another quantized format.

Read this page, then `linear_forward` and `linear_backward`, which compute each product below its equation.

**Products.** Training a linear layer takes three matrix products, one in the forward and two in the backward
pass. M is the number of rows of x: the product of all its dimensions but the last. dy, dx, dw and db are the
gradients of the loss with respect to y, x, weight and bias. A product is one call, `multiply(a, b, epilogue)`, which
computes a @ b.T: the kernel contracts the last axis of both arrays. If a matrix stores the contracted axis last, the
kernel reads it row-wise, untransposed; otherwise it reads the transposed matrix, column-wise:

| product | contracts | reads |
| --- | --- | --- |
| y [M, N] = x [M, K] @ weight [N, K].T + bias | K | row-wise x, row-wise weight |
| dx [M, K] = dy [M, N] @ weight [N, K] | N | row-wise dy, column-wise weight |
| dw [N, K] = dy [M, N].T @ x [M, K] | M | column-wise dy, column-wise x |

**Quantization.** FP8 represents a matrix by 8-bit codes and a scale: x is approximately codes * scale. The format
E4M3 has codes up to fp8_max = 448; E5M2 up to 57,344, with one bit less precision. Values are
multiplied before they are rounded, so that they use this range. With per-tensor scaling, a matrix
has one float32 scale. Current scaling derives the multiplier from the matrix itself:

    amax = max(|x|)
    multiplier = fp8_max / amax
    codes = round_to_fp8(x * multiplier)
    scale = 1 / multiplier

Delayed scaling takes amax from earlier calls (`quantization/delayed_scaling.py`). `quantizer.scale` is the multiplier,
the inverse of the scale above. With per-tensor scaling, x and weight are by default E4M3, and dy, whose values vary
more, is E5M2. Block formats have one scale per block:

| recipe | x and dy block | weight block | codes | scales |
| --- | --- | --- | --- | --- |
| Float8BlockScaling | 1 x 128 | 128 x 128 | E4M3 | float32, by default powers of two |
| MXFP8BlockScaling | 1 x 32 | 1 x 32 | E4M3 | powers of two (E8M0) |
| NVFP4BlockScaling | 1 x 16 | 16 x 16 | E2M1, 4 bits | E4M3, and one float32 per tensor |

`quantization/families.py` chooses a quantizer for each matrix. With one scale per tensor, the multiplication

    x @ weight.T = (x_codes @ weight_codes.T) * (x_scale * weight_scale)

multiplies codes, which GPUs do twice as fast as with bfloat16 values. The sums are float32, except on Hopper: there,
sums of FP8 products have about 14 bits unless `spec.accumulation` requests float32. With block scales, the kernel
multiplies the partial sum of each block by the scales of the block.

y and dx have the dtype `spec.dtype`, unless the caller requests them quantized. Parameters are in high precision,
unless the caller created them quantized. MXFP8 requires that M, N and K are multiples of 32, NVFP4 of 16; for other
shapes the layer runs unquantized and warns (`precision.py`). The other formats support every shape: some product
backends pad the codes (`primitives/gemm`).

**Directions.** A product can apply scales only if each scale covers the whole contracted axis or a block of
it. x, weight and dy are each read by two products, which contract different axes. Each matrix is therefore
quantized in two directions: row-wise, [M, K] with scales along K, and column-wise, the transposed matrix
[K, M] with scales along M. One kernel computes both directions. A scale per tensor is valid for both
directions, but Hopper's FP8 products read codes along the contracted axis only, so that the transposed codes
are still written. On GPUs whose products read codes along either axis (`reads_all_layouts` in
`primitives/gemm/cublaslt.py`), they are not.

An `Operand` contains the codes and scales for one direction, and `Operands` is the pair (row-wise, column-wise) of one
matrix. Unquantized values serve both directions without a copy: row-wise the tensor itself, column-wise
`TransposedValues` of it.

**Saved operands.** The forward pass multiplies the row-wise operands and saves x and weight for the backward pass:

| setting | x and weight are saved as | the backward pass |
| --- | --- | --- |
| SAVED (default) | column-wise codes, or the values in an unquantized layer | multiplies them |
| `input_columns`, `weight_columns` are RECOMPUTED | values, and their multiplier or amax | casts the columns again |
| `input_columns` is PRODUCED | the weight as by default, no x | receives x columns from `produce_input` |
| `keep_input` | x values, the weight as by default | quantizes x again |
| `backward_operands` is HIGH_PRECISION | values | multiplies these values |
| `backward_operands` is DEQUANTIZED | row-wise codes | multiplies the decoded codes |
| `gather_input` is VALUES | the values in this rank's rows of x | gathers and quantizes them again |
| `gather_input` is ROW_CODES | the row-wise codes of this rank's rows of x | gathers and transposes them |

RECOMPUTED is chosen for per-tensor scaled operands of at least 2**21 elements whose values are in memory anyway
(`deferred_columns.py`): attention outputs, and unquantized weights if x has at least 16,384 rows. An update of
multipliers between the passes does not change the backward pass: saved codes have their own scale, recomputed columns
have the multiplier of the forward pass, and `keep_input` is rejected under delayed scaling.

**Memory.** A function that takes a list of operands empties the list, and names are deleted after their last use: a
buffer must be free before the next product allocates its result.

**Other files.** The functions in this file are complete for one device:

| question | file |
| --- | --- |
| How do x, weight and dy become operands? | `linear_operands.py`, by the quantizers in `tensor/` |
| What are the call settings? | `linear_spec.py`: `LinearSpec` |
| Where is the weight that `is_first_microbatch` keeps? | `LinearSpec.cached_weight`, from `module/weight_cache.py` |
| Which functions call the passes, and save operands between them? | `layer.py` |
| How are y and dx summed over ranks, inspected or returned quantized? | `linear_results.py` |
| How are sharded x and dy gathered from the ranks? | `gathered_operands.py`; each is `Pending` until it has arrived |
| How is dw accumulated into `main_grad`, or delayed? | `weight_gradient.py` |

**Breakpoints.** Calls are of one kind if their shapes, strides, dtypes and settings are equal. On a GPU,
`fast/compiled.py` compiles a forward pass in the second call of each kind, and its backward pass one iteration later:
it runs the functions on symbols in place of tensors and records the kernels that they launch. Later calls repeat
these kernels: a print or a breakpoint takes no effect from the third forward and the fourth backward pass on. The
environment variable TE_FAST=0, set before the import, disables compilation. Some calls always run these functions,
for example under a forced backend, and so do backward passes that accumulate into `main_grad` or delay the weight
gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

# `offloading.synchronizer`: this thread's open offloading context, which copies saved tensors to the host, or None.
# `offloading.used`: any thread has ever opened one, so that a saved tensor may be on the host.
from ..offload.marks import active as offloading
from ..offload.marks import keep_weight
from ..primitives.column_sums import column_sums
from ..primitives.gemm import Epilogue, as_matrix, multiply
from ..runtime.autograd import Function
from ..runtime.double_backward import once_differentiable
from ..tensor.quantizer import Operands, TransposedValues
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
from .linear_spec import DEQUANTIZED, HIGH_PRECISION, QUANTIZED, RECOMPUTED, SAVED, LinearSpec
from .saving import Saved


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> Tensor:
    """Compute y [.., N] = x [.., K] @ weight [N, K].T + bias [N], differentiable in all three tensors."""
    if spec.needs_grad:
        return _LinearNode.apply(x, weight, bias, spec)
    return run_without_saving(LINEAR_FUNCTIONS, spec, (x, weight, bias))[0]


class _LinearNode(Function):
    """Node in autograd's graph. `layer.py` runs both passes, saves their operands and restores leading dimensions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> Any:
        return run_and_save(LINEAR_FUNCTIONS, ctx, spec, (x, weight, bias))[0]

    @staticmethod
    @once_differentiable("Linear")
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return *run_backward(LINEAR_FUNCTIONS, ctx, (grad_output,)), None  # no gradient for spec


def linear_forward(
    x: Tensor | Operands,
    weight: Tensor,
    bias: Tensor | None,
    spec: LinearSpec,
    accumulate_into: Tensor | None = None,
) -> tuple[Any, Saved, Saved]:
    """Compute y [M, N] = x [M, K] @ weight [N, K].T + bias [N].

    Args:
        x: Tensor [.., K], possibly quantized, or its `Operands` if the kernel that computed x has quantized it.
        weight: Weight [N, K] on this rank, possibly quantized.
        bias: Bias [N], or None.
        spec: Quantizers, dtype, communication and required gradients for this call kind.
        accumulate_into: Matrix [M, N] into which y is accumulated in place; None to allocate y.

    Returns:
        (y [M, N], saved x, saved weight); see "Saved operands" above. The saved x is None if dw is not needed, and
        the saved weight if dx is not needed.
    """
    x_rows, saved_input = quantize_input(x, spec)
    w_rows, saved_weight = quantize_weight(weight, spec)
    epilogue = _epilogue(spec, bias, accumulate_into, spec.accumulation.forward)
    y_is_product = not (
        spec.communicates or spec.inspector is not None or spec.output_quantizer is not None
    )
    # y [M, N] = x [M, K] @ weight [N, K].T + bias [N]: x row-wise, the weight row-wise. `compute_output` would return
    # the same; the product is written out below its equation.
    if y_is_product:
        y = multiply(to_operand(x_rows), to_operand(w_rows), epilogue)
    else:  # y is summed over ranks, inspected or quantized
        operands = [x_rows, w_rows]
        del x_rows, w_rows
        y = compute_output(operands, epilogue, spec)
    return y, saved_input, saved_weight


def quantize_input(x: Tensor | Operands, spec: LinearSpec) -> tuple[Any, Saved]:
    """Quantize x [M, K]: row-wise for y, column-wise for dw.

    Returns:
        (operand for y, or a `Pending` gather of it; saved x, see "Saved operands" above, or this rank's shard of it
        if the input is gathered).
    """
    if spec.communicates and spec.parallel.gathers_input:
        return gather_quantized_input(x, spec)
    if spec.input_columns == RECOMPUTED:  # chosen only where dw is needed
        return cast_rows(x, spec.input_quantizer)
    if isinstance(x, Operands):  # from the kernel that computed x
        x_rows, x_columns = x
    else:
        needs_columns = (
            spec.needs_grad_weight and spec.backward_operands == QUANTIZED and not spec.keep_input
        )
        x_rows, x_columns = cast_input(x, spec, rowwise=True, columnwise=needs_columns)
    return x_rows, input_to_save(x, x_rows, x_columns, spec)


def quantize_weight(weight: Tensor, spec: LinearSpec) -> tuple[Any, Saved]:
    """Quantize the weight [N, K]: row-wise for y, column-wise for dx. Codes of a quantized weight are reused.

    Returns:
        (operand for y; saved weight, see "Saved operands" above).
    """
    if spec.weight_columns == RECOMPUTED:  # chosen only where dx is needed
        return cast_rows(weight, spec.weight_quantizer)
    needs_columns = spec.needs_grad_input and spec.backward_operands == QUANTIZED
    w_rows, saved = weight_operands(weight, spec, needs_columns)
    if not spec.needs_grad_input:
        return w_rows, None
    if spec.backward_operands == DEQUANTIZED:
        saved = w_rows
    elif spec.backward_operands == HIGH_PRECISION:
        saved = TransposedValues(converted(weight, spec.dtype))
    if offloading.synchronizer is not None:
        keep_weight(saved)  # an offloading context leaves weights on the device
    return w_rows, saved


def linear_backward(
    operands: list[Any],
    spec: LinearSpec,
    *,
    accumulate_into: Tensor | None = None,
    produce_input: Callable[[Any], tuple[Any, Saved]] | None = None,
) -> tuple[Any, Tensor | None, Tensor | None]:
    """Compute dx [M, K] = dy [M, N] @ weight [N, K], dw [N, K] = dy.T @ x [M, K], and db [N], the sum of dy over M.

    Args:
        operands: [dy, x, weight], or [dy, x, weight, u] for dx * gelu'(u), computed in the epilogue of the product.
            dy [.., N] may be its `GradientOperands` if the kernel that computed dy has quantized it. x and weight are
            as `linear_forward` saved them. The list is emptied; autograd holds dy itself until the node returns.
        spec: Quantizers, dtype, communication and required gradients for this call kind.
        accumulate_into: Matrix [M, K] into which dx is accumulated in place; None to allocate dx.
        produce_input: For fused layers that recompute x: function dx -> (value returned in place of dx, column-wise
            x). It receives dx because one kernel can compute both results: for x = act(u), the kernel that
            computes du from dx reads u and also writes the columns of x (`norm_mlp.py`).

    Returns:
        (dx, dw, db); None for a gradient that is not needed. dw is also None, or a placeholder, if it is delayed or
        accumulated into `weight.main_grad`, a buffer of the caller (`WeightGradient.compute`).
    """
    dy, x, weight = operands[:3]
    gelu_input = operands[3:]  # [u] or []
    operands.clear()
    if spec.communicates and saves_input_shard(spec):
        x = begin_gather_saved(x, spec)  # the rows of x are in transit while dx is computed
    # db [N] = sum of dy [M, N] over M; dy is quantized row-wise for dx and column-wise for dw.
    (dy_rows, dy_columns), db = prepare_gradient(dy, spec)
    del dy
    dx: Any = None
    if spec.needs_grad_input:
        # Only a shortcut: `weight_column_operand` returns weights that are saved otherwise unchanged.
        if spec.backward_operands == DEQUANTIZED or spec.weight_columns != SAVED or offloading.used:
            weight = weight_column_operand(weight, spec)
        epilogue = _epilogue(spec, None, accumulate_into, spec.accumulation.grad_input)
        dx_is_product = not (
            spec.communicates or spec.inspector is not None or spec.grad_input_quantizer is not None
        )
        # dx [M, K] = dy [M, N] @ weight [N, K]: dy row-wise, the weight column-wise.
        if dx_is_product and not gelu_input:
            dx = multiply(to_operand(dy_rows), to_operand(weight), epilogue)
            del weight
        else:
            product_operands = [dy_rows, weight, *gelu_input]
            del dy_rows, weight, gelu_input
            # dx may be a `Pending`: it is summed over the ranks while dw is computed, and awaited at the end.
            dx, dy_rows = begin_input_gradient(product_operands, epilogue, spec)
    if produce_input is not None:  # only in layers that do not communicate, so dx is no `Pending`
        dx, x = produce_input(dx)
    if spec.communicates and spec.needs_grad_weight:
        dy_columns = gather_columns(dy_columns, dy_rows)
    del dy_rows
    dw = None
    if spec.needs_grad_weight:
        # Only a shortcut: `input_column_operand` returns inputs that are saved otherwise unchanged.
        casts_again = spec.keep_input or spec.input_columns == RECOMPUTED
        if (
            casts_again
            or spec.backward_operands != QUANTIZED
            or spec.communicates
            or offloading.used
        ):
            x = input_column_operand(x, spec)
        # dw [N, K] = dy [M, N].T @ x [M, K]: both column-wise. It is returned, accumulated into main_grad, or delayed.
        dy_operand, x_operand = to_operand(dy_columns), to_operand(x)
        del dy_columns, x
        dw = spec.weight_gradient.compute(
            dy_operand,
            x_operand,
            exact=spec.accumulation.grad_weight,
            dtype=spec.grad_weight_dtype or spec.dtype,
            inspector=spec.inspector,
        )
        del dy_operand, x_operand
    if isinstance(dx, Pending):
        dx = end_input_gradient(dx, spec)
    return dx, dw, db


def prepare_gradient(dy: Any, spec: LinearSpec) -> GradientOperands:
    """Quantize dy [M, N] row-wise for dx and column-wise for dw, and compute db [N], the sum of dy over M."""
    if isinstance(dy, GradientOperands):  # from the kernel that computed dy
        return dy
    if spec.communicates and spec.parallel.gathers_gradient:
        dy = begin_gather_gradient(dy, spec)
        if isinstance(dy, GradientOperands):  # gathered as codes
            return dy
    dy = dense_values(dy)  # the gradient of a sum, for example, is an expanded scalar
    db = None
    if spec.needs_grad_bias:
        dtype, cast = spec.grad_bias_dtype or spec.dtype, gradient_cast(spec)
        if cast is not None:
            # One kernel reads dy once, for its codes and for db. `cast` describes the quantization to this
            # kernel; `adopt` converts the codes to operands.
            codes, db = column_sums(as_matrix(dy), dtype, cast)
            return GradientOperands(spec.grad_output_quantizer.adopt(codes, dy.dtype), db)
        db = column_sums(as_matrix(dy), dtype)
    return GradientOperands(
        cast_gradient(dy, spec, rowwise=spec.needs_grad_input, columnwise=spec.needs_grad_weight),
        db,
    )


def _epilogue(
    spec: LinearSpec, bias: Tensor | None, out: Tensor | None, split_accumulator: bool
) -> Epilogue:
    """Settings for a product's end: result = product + bias, or out += product + bias.

    A split accumulator promotes partial sums to float32; Hopper's FP8 products otherwise keep about 14 bits.
    """
    if out is None:
        return Epilogue(spec.dtype, bias=bias, exact=split_accumulator)
    return Epilogue(out.dtype, bias, out, accumulate=True, exact=split_accumulator)


LINEAR_FUNCTIONS = LayerFunctions(
    "Linear", linear_forward, linear_backward, num_results=1, num_gradients=1
)
