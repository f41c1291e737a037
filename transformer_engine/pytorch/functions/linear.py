"""y [M, N] = x [M, K] @ w [N, K].T + b, and its three gradients, each product in the formats its quantizers say."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..primitives.column_sums import column_sums
from ..primitives.gemm import Epilogue, as_matrix, gemm
from ..primitives.gemm.request import Layout
from ..primitives.operand import Operand, plain
from ..primitives.quantize import Cast, dequantize
from ..runtime.applying import applier
from ..runtime.tracing import result_in
from ..tensor.quantized_tensor import QuantizedTensorStorage
from ..tensor.quantizer import Matrix, Operands, Quantizer, turned
from .linear_operands import linear_operands, plain_matrices
from .linear_spec import (
    IDENTITY,
    LinearSaved,
    LinearSpec,
    backward_quantizers,
    cached_parts,
    changed,
    gradient_cast,
    sums_over_ranks,
)
from .repetition import Repeated, Repeats, repeats_on
from .saving import arrives, backward_of, pack, restore, save, unpack


class QuantizedGradient(NamedTuple):
    """The gradient of a layer's output as its products read it, and its sum over rows where there is a bias."""

    operands: Operands
    bias: Tensor | None = None


def linear_forward(
    x: Tensor | Operands,
    weight: Tensor,
    bias: Tensor | None,
    spec: LinearSpec,
    leading: torch.Size | None = None,
) -> tuple[Tensor, LinearSaved]:
    """y [M, N] = x [M, K] @ weight [N, K].T + bias [N], with the operands that the backward needs.

    leading   dimensions of y in place of M, of a spec that does not communicate
    """
    products = spec.products
    if spec.plain and products is not None:
        matrices, saved = plain_matrices(x, weight, spec)  # pyright: ignore[reportArgumentType]
        y = products.forward.of_matrices(*matrices, bias, leading)
    else:
        x_operand, w_operand, saved = linear_operands(x, weight, spec)
        if products is None:
            y = gemm(x_operand, w_operand, Epilogue(spec.dtype, bias=bias, exact=spec.accumulation.forward))
            y = y if leading is None else result_in(y, (*leading, y.shape[-1]))
        else:
            y = products.forward.of_operands(x_operand, w_operand, bias, leading)
    return spec.parallel.leave_forward(y) if spec.communicates else y, saved


class LinearGradients(NamedTuple):
    input: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def linear_backward(
    grad_output: Tensor | QuantizedGradient,
    saved: list[Any],
    spec: LinearSpec,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    input_product: Callable[[Operand, Operand, Epilogue], Tensor] | None = None,
    leading: torch.Size | None = None,
) -> LinearGradients:
    """dx [M, K] = dy [M, N] @ w [N, K];  dw [N, K] = dy.T @ x [M, K];  db [N] = sum over rows of dy, in float32.

    saved           the two of LinearSaved, which are taken out of the list
    input_product   makes dx where something follows it in the same pass: the gradient of an activation, a cast
    leading         dimensions of dx in place of M, where nothing does, of a spec that does not communicate
    Of a plain spec dy, and x in saved, may have several dimensions in place of M, which dx has then by default.
    Operands go as soon as they have been read: give what saved and input_product hold without holding it.
    """
    w, x = saved.pop(), saved.pop()
    if spec.plain:
        dy = _values(grad_output, spec)  # pyright: ignore[reportArgumentType]
        grad_bias = column_sums(as_matrix(dy), bias_dtype) if spec.needs_grad_bias else None
        del grad_output  # what is not read any more makes room for the results
        arrives(w)
        grad_input = None if w is None else _plain_grad_input(dy, w, spec, input_product, leading)
        del w, input_product
        arrives(x)
        grad_weight = None if x is None else _plain_grad_weight(dy, x, spec, weight_dtype)
        return LinearGradients(grad_input, grad_weight, grad_bias)
    (dy_row, dy_column), grad_bias = _read_by_products(
        grad_output, w is not None, x is not None, spec, bias_dtype
    )
    dy_column = None if dy_column is None else turned(dy_column)
    del grad_output
    grad_input = grad_weight = None
    if w is not None:
        assert dy_row is not None
        arrives(w)
        grad_input = _grad_input(dy_row, _backward_operand(w, spec), spec, input_product, leading)
    del dy_row, w, input_product
    if x is not None:
        assert dy_column is not None
        arrives(x)
        grad_weight = _grad_weight(dy_column, _input_operand(x, spec), spec, weight_dtype)
    return LinearGradients(grad_input, grad_weight, grad_bias)


def _plain_grad_input(
    dy: Tensor,
    w: Tensor,
    spec: LinearSpec,
    product: Callable[..., Tensor] | None,
    leading: torch.Size | None,
) -> Tensor:
    """dx [M, K] = dy [M, N] @ w [N, K], unquantized."""
    if spec.products is None or product is not None:
        return _grad_input(plain(as_matrix(dy)), plain(w.t()), spec, product)
    dx = spec.products.grad_input.of_matrices(dy, w, None, leading)
    return spec.parallel.leave_backward(dx) if spec.communicates else dx


def _grad_input(
    dy: Operand,
    w: Operand,
    spec: LinearSpec,
    product: Callable[..., Tensor] | None,
    leading: torch.Size | None = None,
) -> Tensor:
    """dx [M, K] of dy [M, N] and w.T [K, N]."""
    if spec.products is not None and product is None:
        dx = spec.products.grad_input.of_operands(dy, w, None, leading)
    else:
        # `product or gemm` would ask a partial whether it is true, which torch 2.11 does not trace.
        multiplied = gemm if product is None else product
        dx = multiplied(dy, w, Epilogue(spec.dtype, exact=spec.accumulation.grad_input))
    return spec.parallel.leave_backward(dx) if spec.communicates else dx


def _plain_grad_weight(dy: Tensor, x: Tensor, spec: LinearSpec, dtype: torch.dtype) -> Tensor | None:
    """dw [N, K] = dy.T [N, M] @ x [M, K], unquantized, to where it goes."""
    if spec.products is not None and spec.products.grad_weight is not None:
        return spec.products.grad_weight.of_matrices(dy, x)
    exact = spec.accumulation.grad_weight
    return spec.weight_gradient.compute(plain(as_matrix(dy).t()), plain(as_matrix(x).t()), exact, dtype)


def _grad_weight(dy: Operand, x: Operand, spec: LinearSpec, dtype: torch.dtype) -> Tensor | None:
    """dw [N, K] of dy.T [N, M] and x.T [K, M], to where it goes."""
    if spec.products is not None and spec.products.grad_weight is not None:
        return spec.products.grad_weight.of_operands(dy, x)
    return spec.weight_gradient.compute(dy, x, spec.accumulation.grad_weight, dtype)


def _values(grad_output: Tensor, spec: LinearSpec) -> Tensor:
    """dy as a matrix of values, of all ranks that the products need it of."""
    dy = spec.parallel.enter_backward(grad_output) if spec.communicates else grad_output
    if isinstance(dy, QuantizedTensorStorage):
        dy = dy.dequantize()
    if dy.is_contiguous():
        return dy
    # Where no axis is contiguous (a sum's gradient is one value everywhere), each reader would copy it.
    dy = as_matrix(dy)
    return dy if Layout.of(dy).stride else dy.contiguous()


def _read_by_products(
    grad_output: Tensor | QuantizedGradient,
    by_rows: bool,
    by_columns: bool,
    spec: LinearSpec,
    bias_dtype: torch.dtype,
) -> QuantizedGradient:
    """dy as the two products read it, by rows and by columns, and its row sum where there is a bias."""
    if isinstance(grad_output, QuantizedGradient):
        return grad_output
    dy = _values(grad_output, spec)
    if not (by_rows or by_columns):
        return QuantizedGradient(
            Operands(None, None), column_sums(dy, bias_dtype) if spec.needs_grad_bias else None
        )
    cast = gradient_cast(spec) if spec.needs_grad_bias else None
    if cast is not None:
        quantized, grad_bias = column_sums(dy, bias_dtype, cast)
        return QuantizedGradient(spec.grad_output.adopt(quantized, dy.dtype), grad_bias)
    grad_bias = column_sums(dy, bias_dtype) if spec.needs_grad_bias else None
    quantizer = spec.grad_output if spec.backward == "quantized" else IDENTITY
    return QuantizedGradient(quantizer.operands(dy, by_rows, by_columns), grad_bias)


def _backward_operand(saved: Operand | Matrix, spec: LinearSpec) -> Operand:
    if spec.backward == "dequantized" and not isinstance(saved, Matrix):
        saved = Matrix(dequantize(saved._replace(dtype=spec.dtype)))
    return turned(saved)


def _input_operand(saved: Operand | Matrix, spec: LinearSpec) -> Operand:
    if spec.keep_input and spec.backward == "quantized":
        assert isinstance(saved, Matrix)
        again = spec.input.operands(as_matrix(saved.values), False, True).columnwise
        assert again is not None
        return turned(again)
    if isinstance(saved, Matrix):
        return plain(as_matrix(saved.values).t())
    return _backward_operand(saved, spec)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> Tensor:
    """y [.., N] = x [.., K] @ weight [N, K].T + bias [N], differentiable in all three."""
    if spec.needs_grad_input or spec.needs_grad_weight or spec.needs_grad_bias:
        return _applied(x, weight, bias, spec)  # pyright: ignore[reportReturnType]
    if spec.repeats is None:
        return _forward(x, weight, bias, spec)[0]
    return spec.repeats.forward([x, weight, bias], spec, cached_parts(spec))[0][0]


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, spec: LinearSpec) -> tuple[Tensor, LinearSaved]:
    repeated = spec.products is not None
    if repeated and spec.plain and spec.output is None:
        return linear_forward(x, weight, bias, spec)
    matrix = x.dim() == 2
    flat = x if matrix or isinstance(x, QuantizedTensorStorage) else x.reshape(-1, x.shape[-1])
    cast = None if spec.output is None else _cast_of_product(spec.output, spec, "row")
    if cast is None and repeated:
        y, saved = linear_forward(flat, weight, bias, spec, x.shape[:-1])
    elif cast is None:
        y, saved = linear_forward(flat, weight, bias, spec)
        # torch 2.11 traces a backward of zeros for an output that is the product itself.
        if not matrix or spec.traced:
            leading = leading_shape(x, y) if spec.communicates else x.shape[:-1]
            y = result_in(y, (*leading, y.shape[-1]))
    else:
        x_operand, w_operand, saved = linear_operands(flat, weight, spec)
        epilogue = Epilogue(spec.dtype, bias=bias, exact=spec.accumulation.forward)
        made = gemm(x_operand, w_operand, epilogue, cast)
        assert made.codes is not None and spec.output is not None
        shape = (*leading_shape(x, made.codes), made.codes.shape[-1])
        return spec.output.adopted(made, shape, spec.dtype), saved  # pyright: ignore[reportReturnType]
    return y if spec.output is None else spec.output.quantize(y), saved  # pyright: ignore[reportReturnType]


def _cast_of_product(quantizer: Quantizer, spec: LinearSpec, mode: str) -> Cast | None:
    """How a product writes the codes of its own result: FP8, with a scale that is known before it."""
    if spec.traced or sums_over_ranks(spec.parallel, mode):
        return None
    cast = quantizer.cast(True, False)
    return cast if cast is not None and cast.multiplier is not None else None


def leading_shape(x: Tensor, y: Tensor) -> tuple[int, ...]:
    """x's leading dimensions, the first of them scaled as sequence parallelism scaled the rows of y."""
    leading = tuple(x.shape[:-1])
    rows = x.numel() // x.shape[-1] if x.shape[-1] else y.shape[0]
    if rows == y.shape[0] or not leading:
        return leading
    return (leading[0] * y.shape[0] // rows, *leading[1:])


def repeating(spec: LinearSpec, device: torch.device) -> LinearSpec:
    """The spec of a layer that is this product alone, whose passes may become lines."""
    quantizes_results = spec.output is not None or spec.grad_input is not None
    if spec.products is None or quantizes_results or not repeats_on(device):
        return spec
    forward = Repeated(_forward_pass, device, (spec.input, spec.weight))
    returned = spec.products.grad_weight is not None  # else it is put off, or goes where no line can know
    backward = Repeated(_backward_pass, device if returned else None, backward_quantizers(spec))
    return changed(spec, repeats=Repeats(forward, backward, 1))


def _forward_pass(given: list[Any], spec: LinearSpec) -> tuple[tuple[Any, ...], list[Any]]:
    """x, weight, bias -> y and what is saved; the forms of that"""
    x, weight, bias = given
    y, saved = _forward(x, weight, bias, spec)
    kept, forms = pack(*saved)
    return (y, *kept), forms


def _backward_pass(given: list[Any], spec: LinearSpec, ctx: Any) -> tuple[tuple[Any, ...], None]:
    """dy and what was saved -> dx, dw, db"""
    grad_output = given.pop(0)
    saved = unpack(given, ctx.forms)
    given.clear()
    return _gradients(grad_output, saved, spec, ctx), None


def _gradients(grad_output: Tensor, saved: list[Any], spec: LinearSpec, ctx: Any) -> tuple[Any, ...]:
    """dx, dw, db, as the node answers them."""
    repeated = spec.products is not None
    if not (repeated and spec.plain):
        grad_output = as_matrix(grad_output)
    quantizer = spec.grad_input
    cast = None if quantizer is None else _cast_of_product(quantizer, spec, "column")
    product: Any = None if cast is None else partial(gemm, cast=cast)
    leading = ctx.input_shape[:-1] if repeated and cast is None else None
    made = linear_backward(grad_output, saved, spec, ctx.weight_dtype, ctx.bias_dtype, product, leading)
    grad_input: Any = made.input
    if grad_input is not None:
        if cast is not None:
            assert quantizer is not None
            grad_input = quantizer.adopted(grad_input, ctx.input_shape, spec.dtype)
        else:
            shape = ctx.input_shape
            grad_input = grad_input if grad_input.shape == shape else grad_input.view(shape)
            grad_input = grad_input if quantizer is None else quantizer.quantize(grad_input)
    return grad_input, made.weight, made.bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, spec):
        if spec.repeats is None:
            y, saved = _forward(x, weight, bias, spec)
            save(ctx, (), saved, spec.scale_update)
        else:
            (y, *kept), kind = spec.repeats.forward([x, weight, bias], spec, cached_parts(spec))
            spec.repeats.save(ctx, kept, kind, spec.scale_update)
        ctx.spec, ctx.input_shape = spec, x.shape
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, weight.dtype if bias is None else bias.dtype
        return y

    @staticmethod
    @backward_of("Linear")
    def backward(ctx, grad_output):  # pyright: ignore[reportIncompatibleMethodOverride]
        spec = ctx.spec
        if spec.repeats is None:
            _, saved = restore(ctx, early=True)
            return *_gradients(grad_output, saved, spec, ctx), None
        return *spec.repeats.backward(ctx, (grad_output,), spec), None


_applied = applier(_Linear)
