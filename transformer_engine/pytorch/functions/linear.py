"""y [M, N] = x [M, K] @ w [N, K].T + b, and its three gradients, each product in the formats its quantizers say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..distributed.tensor_parallel import TensorParallel
from ..double_backward import once_differentiable
from ..primitives.column_sums import column_sums
from ..primitives.gemm import Epilogue, gemm, gemm_codes
from ..primitives.gemm.request import Layout
from ..primitives.operand import Operand, plain
from ..primitives.quantize import Cast, dequantize
from ..primitives.quantize_dbias import quantize_with_dbias
from ..tensor.axis import COLS, ROWS
from ..tensor.identity_tensor import IdentityQuantizer
from ..tensor.quantized_tensor import QuantizedTensorStorage, storage_of
from ..tensor.quantizer import Matrix, Operands, Quantizer, turned
from ..tensor.storage.quantized_tensor_storage import as_matrix
from .saving import pack, take_saved, unpack
from .scale_update import ScaleUpdate
from .weight_gradient import WeightGradient

IDENTITY = IdentityQuantizer()


@dataclass(frozen=True)
class Accumulation:
    """Which products promote partial sums to float32 ("split accumulator"): forward, input and weight gradient."""

    forward: bool = False
    grad_input: bool = True
    grad_weight: bool = True


@dataclass(frozen=True)
class LinearSpec:
    """Everything a linear layer's forward and backward need beside the tensors, resolved once per forward.

    output, grad_input   quantizers of the results, None to leave them in `dtype`
    cached_weight        the weight as quantized for an earlier microbatch, else None
    backward             "quantized", or the recipe's override: "high_precision" or "dequantized"
    keep_input           save the unquantized input and quantize it again in the backward
    scale_update         what delayed scaling updates when this backward has run
    Defaults are plain constants: torch 2.11 cannot trace a default that is an object.
    """

    dtype: torch.dtype
    input: Quantizer
    weight: Quantizer
    grad_output: Quantizer
    accumulation: Accumulation
    parallel: TensorParallel
    weight_gradient: WeightGradient
    output: Quantizer | None = None
    grad_input: Quantizer | None = None
    cached_weight: QuantizedTensorStorage | None = None
    backward: str = "quantized"
    keep_input: bool = False
    needs_grad_input: bool = True
    needs_grad_weight: bool = True
    needs_grad_bias: bool = False
    scale_update: ScaleUpdate | None = None


class LinearSaved(NamedTuple):
    """The operands of the two backward products: x for dw, w for dx (None where its product is not needed)."""

    input: Operand | Matrix | None
    weight: Operand | Matrix | None


def input_cast(spec: LinearSpec) -> Cast | None:
    """How the kernel that makes a layer's input may quantize it on the way; None where the layer has to."""
    if spec.keep_input or spec.backward != "quantized" or spec.parallel.gathers_input:
        return None
    if torch.compiler.is_compiling():
        return None  # writes to the scaling state have to be seen by the compiler
    return spec.input.cast(True, spec.needs_grad_weight)


def gradient_cast(spec: LinearSpec) -> Cast | None:
    """The same for the kernel that makes the gradient of a layer's output."""
    if not spec.needs_grad_input or spec.backward != "quantized" or spec.parallel.gathers_gradient:
        return None
    if torch.compiler.is_compiling():
        return None
    return spec.grad_output.cast(True, spec.needs_grad_weight)


class QuantizedGradient(NamedTuple):
    """The gradient of a layer's output as its products read it, and its sum over rows where there is a bias."""

    operands: Operands
    bias: Tensor | None = None


def linear_forward(
    x: Tensor | Operands, weight: Tensor, bias: Tensor | None, spec: LinearSpec
) -> tuple[Tensor, LinearSaved]:
    """y [M, N] = x [M, K] @ weight [N, K].T + bias [N], with the operands that the backward needs."""
    x_operand, w_operand, saved = linear_operands(x, weight, spec)
    y = gemm(x_operand, w_operand, Epilogue(spec.dtype, bias=bias, exact=spec.accumulation.forward))
    return spec.parallel.leave_forward(y), saved


def linear_operands(
    x: Tensor | Operands, weight: Tensor, spec: LinearSpec
) -> tuple[Operand, Operand, LinearSaved]:
    """x and weight as the forward product reads them, and as the backward will."""
    quantized_backward = spec.backward == "quantized"
    if isinstance(x, Operands):
        x_operands = x
    else:
        x = spec.parallel.enter_forward(x)
        x_columnwise = spec.needs_grad_weight and quantized_backward and not spec.keep_input
        x_operands = input_operands(x, spec.input, x_columnwise)
    w_operands = weight_operands(weight, spec, spec.needs_grad_input and quantized_backward)
    assert x_operands.rowwise is not None and w_operands.rowwise is not None
    if quantized_backward and not spec.keep_input:
        saved = LinearSaved(
            x_operands.columnwise if spec.needs_grad_weight else None,
            w_operands.columnwise if spec.needs_grad_input else None,
        )
    else:
        assert not isinstance(x, Operands), "input_cast asks for none then"
        saved = _saved_otherwise(x, x_operands, weight, w_operands, spec)
    return x_operands.rowwise, w_operands.rowwise, saved


def input_operands(x: Tensor, quantizer: Quantizer, columnwise: bool) -> Operands:
    """x as the products read it; an input that arrives quantized is taken as it is.

    Where its columns are Hadamard transformed and the gradient's, which they are multiplied with, are not, or the
    other way round, it is quantized again.
    """
    if isinstance(x, QuantizedTensorStorage):
        if not columnwise or storage_of(x).column_signs == quantizer.column_signs:  # pyright: ignore[reportArgumentType]
            return _operands_of(x, columnwise)
        x = as_matrix(x)
    return quantizer.operands(x, True, columnwise)


def weight_operands(weight: Tensor, spec: LinearSpec, columnwise: bool) -> Operands:
    """The weight as the products read it: the cached copy, the quantized parameter itself, or a fresh quantization."""
    if spec.cached_weight is not None:
        return _directions(spec.cached_weight, columnwise)
    if isinstance(weight, QuantizedTensorStorage):
        if spec.weight.is_identity:
            values = weight.dequantize(dtype=spec.dtype)  # pyright: ignore[reportCallIssue]
            return Operands(plain(values), Matrix(values))
        return _operands_of(weight, columnwise)
    if spec.weight.is_identity and weight.dtype != spec.dtype:
        weight = weight.to(spec.dtype)
    return spec.weight.operands(weight, True, columnwise)


def _operands_of(tensor: QuantizedTensorStorage, columnwise: bool) -> Operands:
    """The directions of a quantized tensor, which makes the column-wise one if it has to."""
    if not torch.compiler.is_compiling():
        # On the tensor itself, so that it keeps what had to be made; a compiler traces no methods of tensors.
        tensor.update_usage(rowwise_usage=True, columnwise_usage=columnwise or None)
    storage = storage_of(tensor)  # pyright: ignore[reportArgumentType]
    storage.update_usage(rowwise_usage=True, columnwise_usage=columnwise or None)
    return _directions(storage, columnwise)


def _directions(storage: QuantizedTensorStorage, columnwise: bool) -> Operands:
    return Operands(storage.contract(COLS), storage.contract(ROWS) if columnwise else None)


def _saved_otherwise(
    x: Tensor, x_operands: Operands, weight: Tensor, w_operands: Operands, spec: LinearSpec
) -> LinearSaved:
    """What the backward reads when it computes from unquantized or dequantized operands, or quantizes x again."""
    kept_x: Operand | Matrix | None = None
    if spec.needs_grad_weight and (spec.keep_input or spec.backward == "high_precision"):
        kept_x = Matrix(as_matrix(x))
    if spec.backward == "high_precision":
        kept_w: Operand | Matrix | None = Matrix(_unquantized(weight, spec.dtype))
    elif spec.backward == "dequantized":
        kept_w = _row_direction(w_operands)
        kept_x = kept_x if spec.keep_input else _row_direction(x_operands)
    else:
        kept_w = w_operands.columnwise
    return LinearSaved(kept_x if spec.needs_grad_weight else None, kept_w if spec.needs_grad_input else None)


def _row_direction(operands: Operands) -> Operand | Matrix:
    row = operands.rowwise
    assert row is not None
    return Matrix(row.codes) if row.format is None else row


def _unquantized(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(tensor, QuantizedTensorStorage):
        return tensor.dequantize(dtype=dtype)  # pyright: ignore[reportCallIssue]
    return tensor.to(dtype)


class LinearGradients(NamedTuple):
    input: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def linear_backward(
    grad_output: Tensor | QuantizedGradient,
    saved: LinearSaved,
    spec: LinearSpec,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    input_product: Callable[[Operand, Operand, Epilogue], Tensor] = gemm,
) -> LinearGradients:
    """dx [M, K] = dy [M, N] @ w [N, K];  dw [N, K] = dy.T @ x [M, K];  db [N] = sum over rows of dy, in float32.

    input_product makes dx where something follows it in the same pass: the gradient of an activation, a cast.
    Operands go as soon as they have been read: give saved, and what input_product holds, without holding it.
    """
    (dy_row, dy_column), grad_bias = _read_by_products(grad_output, saved, spec, bias_dtype)
    x, w = saved
    del grad_output, saved  # what is not read any more makes room for the results
    grad_input = grad_weight = None
    if w is not None:
        assert dy_row is not None
        grad_input = input_product(
            dy_row,
            _backward_operand(w, spec),
            Epilogue(spec.dtype, exact=spec.accumulation.grad_input),
        )
        grad_input = spec.parallel.leave_backward(grad_input)
    del dy_row, w, input_product
    if x is not None:
        assert dy_column is not None
        grad_weight = spec.weight_gradient.compute(
            turned(dy_column), _input_operand(x, spec), spec.accumulation.grad_weight, weight_dtype
        )
    return LinearGradients(grad_input, grad_weight, grad_bias)


def _read_by_products(
    grad_output: Tensor | QuantizedGradient, saved: LinearSaved, spec: LinearSpec, bias_dtype: torch.dtype
) -> QuantizedGradient:
    """dy as the two products read it, and its row sum where there is a bias."""
    if isinstance(grad_output, QuantizedGradient):
        return grad_output
    dy = spec.parallel.enter_backward(grad_output)
    if isinstance(dy, QuantizedTensorStorage):
        dy = dy.dequantize()
    dy = _dense(dy)
    if saved.weight is None and saved.input is None:
        return QuantizedGradient(
            Operands(None, None), column_sums(dy, bias_dtype) if spec.needs_grad_bias else None
        )
    cast = gradient_cast(spec) if spec.needs_grad_bias else None
    if cast is not None:
        quantized, grad_bias = quantize_with_dbias(dy, cast, bias_dtype)
        return QuantizedGradient(spec.grad_output.adopt(quantized, dy.dtype), grad_bias)
    grad_bias = column_sums(dy, bias_dtype) if spec.needs_grad_bias else None
    quantizer = spec.grad_output if spec.backward == "quantized" else IDENTITY
    return QuantizedGradient(
        quantizer.operands(dy, saved.weight is not None, saved.input is not None), grad_bias
    )


def _dense(dy: Tensor) -> Tensor:
    """dy, copied where no axis is contiguous (a sum's gradient is one value everywhere), or each reader would."""
    return dy if dy.is_contiguous() or Layout.of(dy).stride else dy.contiguous()


def _backward_operand(saved: Operand | Matrix, spec: LinearSpec) -> Operand:
    if spec.backward == "dequantized" and not isinstance(saved, Matrix):
        saved = Matrix(dequantize(saved._replace(dtype=spec.dtype)))
    return turned(saved)


def _input_operand(saved: Operand | Matrix, spec: LinearSpec) -> Operand:
    if spec.keep_input and spec.backward == "quantized":
        assert isinstance(saved, Matrix)
        again = spec.input.operands(saved.values, False, True).columnwise
        assert again is not None
        return turned(again)
    return _backward_operand(saved, spec)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> Tensor:
    """y [.., N] = x [.., K] @ weight [N, K].T + bias [N], differentiable in all three."""
    if spec.needs_grad_input or spec.needs_grad_weight or spec.needs_grad_bias:
        return _Linear.apply(x, weight, bias, spec)  # pyright: ignore[reportReturnType]
    return _forward(x, weight, bias, spec)[0]


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> tuple[Tensor, LinearSaved]:
    flat = x if isinstance(x, QuantizedTensorStorage) else x.reshape(-1, x.shape[-1])
    cast = None if spec.output is None else _cast_of_product(spec.output, spec.parallel, "row")
    if cast is None:
        y, saved = linear_forward(flat, weight, bias, spec)
    else:
        x_operand, w_operand, saved = linear_operands(flat, weight, spec)
        epilogue = Epilogue(spec.dtype, bias=bias, exact=spec.accumulation.forward)
        y = gemm_codes(x_operand, w_operand, epilogue, cast)
    y = y.view(*leading_shape(x, y), y.shape[-1])
    return y if spec.output is None else _quantized(y, spec.output, spec.dtype), saved


def sums_over_ranks(parallel: TensorParallel, mode: str) -> bool:
    """Is a product only this rank's part of a sum: the forward's of "row", the input gradient's of "column"?"""
    return parallel.mode == mode and parallel.size > 1


def _cast_of_product(quantizer: Quantizer, parallel: TensorParallel, mode: str) -> Cast | None:
    """How a product writes the codes of its own result: FP8, with a scale that is known before it."""
    if torch.compiler.is_compiling() or sums_over_ranks(parallel, mode):
        return None
    cast = quantizer.cast(True, False)
    return cast if cast is not None and cast.multiplier is not None else None


def _quantized(made: Tensor, quantizer: Any, dtype: torch.dtype) -> Any:
    """A product's result as the quantizer's tensor; where its dtype is not the product's, it is the codes already."""
    if made.dtype == dtype:
        return quantizer.quantize(made)
    return quantizer.create_tensor_from_data(made.view(torch.uint8), fake_dtype=dtype)


def leading_shape(x: Tensor, y: Tensor) -> tuple[int, ...]:
    """x's leading dimensions, the first of them scaled as sequence parallelism scaled the rows of y."""
    leading = tuple(x.shape[:-1])
    rows = x.numel() // x.shape[-1] if x.shape[-1] else y.shape[0]
    if rows == y.shape[0] or not leading:
        return leading
    return (leading[0] * y.shape[0] // rows, *leading[1:])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, spec):
        y, saved = _forward(x, weight, bias, spec)
        tensors, ctx.forms = pack(*saved)
        ctx.save_for_backward(*tensors)
        ctx.spec, ctx.input_shape = spec, x.shape
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, weight.dtype if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable("Linear")
    def backward(ctx, grad_output):  # pyright: ignore[reportIncompatibleMethodOverride]
        spec = ctx.spec
        saved = [LinearSaved(*unpack(take_saved(ctx), ctx.forms))]
        grad_output = grad_output.reshape(-1, grad_output.shape[-1])
        quantizer, product = spec.grad_input, gemm
        cast = None if quantizer is None else _cast_of_product(quantizer, spec.parallel, "column")
        if cast is not None:
            product = partial(gemm_codes, cast=cast)
        grads = linear_backward(grad_output, saved.pop(), spec, ctx.weight_dtype, ctx.bias_dtype, product)
        if spec.scale_update is not None:
            spec.scale_update.run()
        grad_input = grads.input
        if grad_input is not None:
            grad_input = grad_input.view(ctx.input_shape)
            if quantizer is not None:
                grad_input = _quantized(grad_input, quantizer, spec.dtype)
        return grad_input, grads.weight, grads.bias, None
