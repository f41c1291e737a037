"""y [.., N] = x [.., K] @ weight [N, K].T + bias [N], differentiable, in the formats of the quantizers.

A linear layer computes three matrix products. Each contracts the last axis of both operands:

| product | contracts | reads |
| --- | --- | --- |
| y [M, N] = x [M, K] @ weight [N, K].T + bias | K | row-wise x, row-wise weight |
| dx [M, K] = dy [M, N] @ weight [N, K] | N | row-wise dy, column-wise weight |
| dw [N, K] = dy [M, N].T @ x [M, K] | M | column-wise dy, column-wise x |

A quantized operand consists of codes and scales. A block scale covers elements along the contracted axis, so x, weight
and dy are each quantized twice: row-wise ([M, K]) and column-wise ([K, M], the transposed matrix). The forward pass
quantizes both directions, multiplies the row-wise operands and saves the column-wise ones. An unquantized tensor serves
as both operands; `Matrix` marks the one that is read transposed.

A tensor-parallel layer has a shard of the weight: [N / ranks, K] in the mode "column", [N, K / ranks] in the mode
"row". Products are then partial sums over the ranks: dx in the mode "column", y in the mode "row". With sequence
parallelism, each rank holds M / ranks rows of the activations between layers: sums over ranks become reduce-scatters,
and x ("column") or dy ("row") is all-gathered, as values or as codes (`LinearSpec.gather_input`). Collectives start as
soon as their input exists and are waited for where the result is read; until then it is a `Pending`.

On a GPU, the second call of a kind runs the functions on `Symbol`s, which record launches and products for
`fast/compiled.py`. All other calls run the functions as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..offload.marks import active as offloading
from ..offload.marks import keep_weight, mark_ready
from ..primitives.column_sums import column_sums
from ..primitives.gemm import Epilogue, as_matrix, gemm, gemm_gelu_gradient, multiply
from ..primitives.quantize import Cast
from ..runtime.autograd import Function
from ..runtime.tracing import result_in
from ..tensor.quantizer import Matrix, Operands, Quantizer
from .communication import Pending, begin_sum, gathered_product, scattered_product
from .gathered_operands import (
    QuantizedGradient,
    begin_gather,
    begin_gather_saved,
    column_operand,
    columns_of_rows,
    gathered_gradient_codes,
    gathered_input,
    gathers_saved_input,
)
from .layer import LayerFunctions, leading_shape, record, run_backward, run_without_saving
from .linear_operands import (
    cast_gradient,
    cast_input,
    converted,
    dense_values,
    dequantized,
    gradient_cast,
    operand_of,
    weight_operands,
)
from .linear_spec import (
    DEQUANTIZED,
    HIGH_PRECISION,
    QUANTIZED,
    Dtypes,
    LinearSpec,
    gathers_gradient_codes,
    inspects,
)
from .saving import backward_of, wait_for_saved


class LinearResult(NamedTuple):
    """Results of `linear_forward`.

    Attributes:
        y: Output [M, N], or `accumulate_into`; None without `compute_y`.
        saved_input: Operand of x that dw reads; None if dw is not needed.
        saved_weight: Operand of the weight that dx reads; None if dx is not needed.
    """

    y: Any
    saved_input: Any
    saved_weight: Any


class LinearGradients(NamedTuple):
    """dx [M, K], dw [N, K], db [N]. None: not needed, delayed, or accumulated into `main_grad`."""

    input: Any
    weight: Tensor | None
    bias: Tensor | None


class OutputGradient(NamedTuple):
    """Operands of dy [M, N], each possibly the `Pending` gather of one; None if no product reads it.

    Attributes:
        rows: Row-wise operand [M, N].
        columns: Column-wise operand [N, M]; None also if `columns_of_rows` computes it from the gathered rows.
        sums: db [N], the sum of dy over M; None if it is not needed.
    """

    rows: Any
    columns: Any
    sums: Tensor | None


def linear_forward(
    x: Any,
    weight: Tensor,
    bias: Tensor | None,
    spec: LinearSpec,
    leading: tuple[int, ...],
    compute_y: bool = True,
    accumulate_into: Tensor | None = None,
) -> LinearResult:
    """Compute y [M, N] = x [M, K] @ weight [N, K].T + bias [N].

    Args:
        x: Tensor [.., K], or its `Operands` if the previous kernel has quantized it.
        weight: Weight [N, K] of this rank.
        bias: Bias [N], or None.
        spec: Quantizers, dtype, communication and required gradients of this kind of call.
        leading: Shape of x without K. Only used to shape a quantized y.
        compute_y: Compute y. Recomputation needs the other results only.
        accumulate_into: Matrix [M, N] into which y is accumulated in place; None to allocate y.
    """
    parallel = spec.parallel
    sums = spec.communicates and parallel.mode == "row"  # y is a partial sum over the ranks
    x_rows, saved_input = quantize_input(x, spec)
    w_rows, saved_weight = quantize_weight(weight, spec)
    if not compute_y:
        return LinearResult(None, saved_input, saved_weight)
    epilogue = _epilogue(spec, bias, accumulate_into, exact=spec.accumulation.forward)
    cast = None if spec.output is None or sums else _result_cast(spec, spec.output, "output")
    # Layers add the bias of a row-parallel product after the sum. A bias that is passed here is added on each rank, in
    # the epilogue, which the scattered product does not have.
    if sums and bias is None and _scatters(spec, "output"):
        y = scattered_product(x_rows, w_rows, epilogue, parallel).wait()
    else:
        # y [M, N] = x [M, K] @ weight [N, K].T + bias: both row-wise.
        y = product(x_rows, w_rows, epilogue, cast)
        del x_rows, w_rows
        if spec.inspector is not None:
            y = _inspect(y, spec, "output")
        if sums:
            y = begin_sum(y, parallel).wait()  # nothing remains to be computed meanwhile
    if spec.output is not None:
        y = _wrap_result(y, spec, spec.output, cast, leading)
    return LinearResult(y, saved_input, saved_weight)


def quantize_input(x: Any, spec: LinearSpec) -> tuple[Any, Any]:
    """Quantize x [M, K]: row-wise for y, column-wise for dw.

    Returns:
        (operand of y, or the `Pending` gather of it; operand saved for dw: column-wise codes [K, M], x itself, or this
        rank's shard).
    """
    if spec.communicates and spec.parallel.gathers_input:
        return gathered_input(x, spec)
    if isinstance(x, Operands):  # from the kernel that computed x
        x_rows, x_columns = x
    else:
        # One kernel quantizes both directions. With keep_input, x is saved and quantized column-wise in the backward
        # pass.
        columns = spec.needs_grad_weight and spec.backward == QUANTIZED and not spec.keep_input
        x_rows, x_columns = cast_input(x, spec, rowwise=True, columnwise=columns)
    if not spec.needs_grad_weight:
        return x_rows, None
    saved: Any = x_rows if spec.backward == DEQUANTIZED else x_columns
    if spec.keep_input or spec.backward == HIGH_PRECISION:
        saved = Matrix(dequantized(x, spec.dtype))
    if offloading.synchronizer is not None:
        mark_ready(saved)
    return x_rows, saved


def quantize_weight(weight: Tensor, spec: LinearSpec) -> tuple[Any, Any]:
    """Quantize the weight [N, K], or read the cached codes or the codes of a quantized parameter.

    Returns:
        (operand of y; operand saved for dx: column-wise codes, or values under `backward_override`).
    """
    w_rows, w_columns = weight_operands(weight, spec, spec.needs_grad_input and spec.backward == QUANTIZED)
    if not spec.needs_grad_input:
        return w_rows, None
    saved: Any = w_rows if spec.backward == DEQUANTIZED else w_columns
    if spec.backward == HIGH_PRECISION:
        saved = Matrix(converted(weight, spec.dtype))
    if offloading.synchronizer is not None:
        keep_weight(saved)
    return w_rows, saved


def linear_backward(
    operands: list[Any],
    spec: LinearSpec,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    leading: tuple[int, ...] = (),
    accumulate_into: Tensor | None = None,
    produce_input: Callable[[Any], tuple[Any, Any]] | None = None,
) -> LinearGradients:
    """Compute dx [M, K] = dy [M, N] @ weight [N, K], dw [N, K] = dy.T @ x [M, K], and db [N], the sum of dy over M.

    Args:
        operands: dy [.., N], or its `QuantizedGradient` from the kernel that computed it; then x and weight as
            `linear_forward` returned them. With a fourth value u [M, K], dx is multiplied by the derivative of GELU at
            u in the epilogue of the product. The list is emptied, so that each buffer is freed after its last reader: u
            is an element, and no keyword argument, because the caller would keep an argument alive.
        spec: Quantizers, dtype, communication and required gradients of this kind of call.
        weight_dtype: Dtype of dw.
        bias_dtype: Dtype of db.
        leading: Shape of x without K. Only used to shape a quantized dx.
        accumulate_into: Matrix [M, K] into which dx is accumulated in place; None to allocate dx.
        produce_input: Function dx -> (result in place of dx, column-wise x) of a layer without communication.
    """
    dy, x, w = operands[:3]
    gelu_input = operands[3:]  # torch 2.11 would trace a starred target as a tuple
    operands.clear()
    if spec.communicates and gathers_saved_input(spec):
        # This rank's rows of x are sent to all ranks while dx is computed.
        x = begin_gather_saved(x, spec)
    dy_rows, dy_columns, db = quantize_output_gradient(dy, spec, bias_dtype)
    del dy
    dx: Any = None
    if spec.needs_grad_input:
        if offloading.used:
            wait_for_saved(w)
        if spec.backward == DEQUANTIZED:
            w = Matrix(dequantized(w, spec.dtype))
        # dx [M, K] = dy [M, N] @ weight [N, K]: dy row-wise, the weight column-wise. With column parallelism, dx is a
        # partial sum; the ranks sum it while dw is computed.
        sums = spec.communicates and spec.parallel.mode == "column"
        epilogue = _epilogue(spec, None, accumulate_into, exact=spec.accumulation.grad_input)
        cast = None if spec.grad_input is None or sums else _result_cast(spec, spec.grad_input, "grad_input")
        if isinstance(dy_rows, Pending) and (gelu_input or cast is not None or accumulate_into is not None):
            dy_rows = dy_rows.wait()  # these products read all rows at once
        if gelu_input:
            dx = gemm_gelu_gradient(operand_of(dy_rows), operand_of(w), gelu_input[0], epilogue)  # pyright: ignore[reportArgumentType]
            gelu_input.clear()
        elif sums and _scatters(spec, "grad_input"):
            dx = scattered_product(dy_rows, w, epilogue, spec.parallel)
        elif isinstance(dy_rows, Pending):
            dx, dy_rows = gathered_product(dy_rows, w, epilogue)
        else:
            dx = product(dy_rows, w, epilogue, cast)
        del w
        if not isinstance(dx, Pending):
            if spec.inspector is not None:
                dx = _inspect(dx, spec, "grad_input")
            if sums:
                dx = begin_sum(dx, spec.parallel)
            elif spec.grad_input is not None:
                dx = _wrap_result(dx, spec, spec.grad_input, cast, leading)
    if produce_input is not None:
        dx, x = produce_input(dx)
    dw = None
    if spec.needs_grad_weight:
        if dy_columns is None:
            dy_columns = columns_of_rows(dy_rows)
        del dy_rows
        # dw [N, K] = dy [M, N].T @ x [M, K]: both column-wise. It is returned, accumulated into main_grad, or delayed.
        left = operand_of(dy_columns.wait() if isinstance(dy_columns, Pending) else dy_columns)
        if isinstance(x, Pending) or spec.keep_input or spec.backward != QUANTIZED:
            x = column_operand(x, spec)
        elif offloading.used:
            wait_for_saved(x)
        right = operand_of(x)
        del dy_columns, x
        exact = spec.accumulation.grad_weight
        dw = spec.weight_gradient.compute(left, right, exact, weight_dtype, spec.inspector)
    if isinstance(dx, Pending):
        dx = dx.wait()
        if spec.grad_input is not None:
            dx = _wrap_result(dx, spec, spec.grad_input, None, leading)
    return LinearGradients(dx, dw, db)


def _epilogue(spec: LinearSpec, bias: Tensor | None, accumulate_into: Tensor | None, exact: bool) -> Epilogue:
    """Return the epilogue y + bias, or accumulate_into += y + bias. `exact` promotes partial sums to float32."""
    if accumulate_into is None:
        return Epilogue(spec.dtype, bias=bias, exact=exact)
    return Epilogue(accumulate_into.dtype, bias, accumulate_into, accumulate=True, exact=exact)


def quantize_output_gradient(dy: Any, spec: LinearSpec, bias_dtype: torch.dtype) -> OutputGradient:
    """Quantize dy [M, N], row-wise for dx and column-wise for dw, and compute db [N], the sum of dy over M."""
    if isinstance(dy, QuantizedGradient):  # from the kernel that computed dy
        return OutputGradient(*dy.operands, dy.sums)
    quantizes = spec.backward == QUANTIZED and not spec.plain
    if not (spec.communicates and spec.parallel.gathers_gradient):
        dy = dense_values(dy)
    elif quantizes and gathers_gradient_codes(spec):
        return OutputGradient(*gathered_gradient_codes(dy, spec), None)
    else:
        pending = begin_gather(dy, spec, dense=True)
        if not quantizes and spec.needs_grad_input and not spec.needs_grad_bias:
            return OutputGradient(pending, None, None)
        dy = pending.wait()
    # db [N] = sum of dy [M, N] over M.
    cast = gradient_cast(spec) if spec.needs_grad_bias else None
    if cast is not None:
        # One kernel reads dy for its codes and its sums.
        codes, db = column_sums(as_matrix(dy), bias_dtype, cast)
        return OutputGradient(*spec.grad_output.adopt(codes, dy.dtype), db)
    db = column_sums(as_matrix(dy), bias_dtype) if spec.needs_grad_bias else None
    if not quantizes:
        return OutputGradient(dy, Matrix(dy), db)
    if not (spec.needs_grad_input or spec.needs_grad_weight):
        return OutputGradient(None, None, db)
    return OutputGradient(*cast_gradient(dy, spec, spec.needs_grad_input, spec.needs_grad_weight), db)


def product(a: Any, b: Any, epilogue: Epilogue, cast: Cast | None = None) -> Any:
    """Compute epilogue(a [M, K] @ b [N, K].T). `a` may be a `Pending` gather. With `cast`, return quantized y."""
    if isinstance(a, Pending):
        if cast is None and epilogue.out is None:
            return gathered_product(a, b, epilogue)[0]
        a = a.wait()
    left, right = operand_of(a), operand_of(b)
    return multiply(left, right, epilogue) if cast is None else gemm(left, right, epilogue, cast)


def _inspect(y: Any, spec: LinearSpec, result: str) -> Any:
    """Let the inspector read or replace a result before it is summed over ranks."""
    return spec.inspector.inspect(result, y) if inspects(spec, result) else y  # pyright: ignore


def _scatters(spec: LinearSpec, result: str) -> bool:
    """Whether the reduce-scatter of a result overlaps with its product."""
    parallel = spec.parallel
    return parallel.overlap.scatter and parallel.sequence and not (spec.traced or inspects(spec, result))


def _result_cast(spec: LinearSpec, quantizer: Quantizer, result: str) -> Cast | None:
    """Return the cast that the product's epilogue applies; None if the result is quantized by a separate kernel.

    Only delayed scaling can be fused: its scale is known before the product runs.
    """
    if spec.traced or inspects(spec, result):
        return None
    cast = quantizer.cast(True, False)
    return cast if cast is not None and cast.multiplier is not None else None


def _wrap_result(
    y: Any, spec: LinearSpec, quantizer: Quantizer, cast: Cast | None, leading: tuple[int, ...]
) -> Any:
    """Return y [M, N], or its codes from the product, as a quantized tensor [.., N]."""
    if cast is None:
        return quantizer.quantize(result_in(y, (*leading_shape(leading, y.shape[0]), y.shape[-1])))
    rows, columns = y.codes.shape
    return quantizer.adopted(y, (*leading_shape(leading, rows), columns), spec.dtype)


def _forward(
    tensors: Sequence[Any], spec: LinearSpec, saves: bool, leading: tuple[int, ...]
) -> tuple[list[Any], list[Any]]:
    x, weight, bias = tensors
    y, *saved = linear_forward(x, weight, bias, spec, leading)
    return [y], saved


def _backward(operands: list[Any], spec: LinearSpec, dtypes: Dtypes, leading: tuple[int, ...]) -> list[Any]:
    return [*linear_backward(operands, spec, *dtypes[0], leading)]


FUNCTIONS = LayerFunctions("Linear", _forward, _backward, results=1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> Tensor:
    """Compute y [.., N] = x [.., K] @ weight [N, K].T + bias [N], differentiable in all three tensors."""
    if spec.needs_grad_input or spec.needs_grad_weight or spec.needs_grad_bias:
        return _Linear.apply(x, weight, bias, spec)  # pyright: ignore[reportReturnType]
    return run_without_saving(FUNCTIONS, spec, (x, weight, bias))[0]


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> Any:
        dtypes = (weight.dtype, weight.dtype if bias is None else bias.dtype)
        return record(FUNCTIONS, ctx, spec, (x, weight, bias), (dtypes,))[0]

    @staticmethod
    @backward_of("Linear")
    def backward(ctx: Any, grad_output: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return *run_backward(FUNCTIONS, ctx, (grad_output,)), None
