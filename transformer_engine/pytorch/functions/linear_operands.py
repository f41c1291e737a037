"""x [M, K] and w [N, K] as the forward product reads them, and what is kept of them for the backward."""

from __future__ import annotations

import torch
from torch import Tensor

from ..offload.marks import active as offloading
from ..offload.marks import keep_weight, whole_now
from ..primitives.operand import Operand, plain
from ..runtime.tracing import result_in
from ..tensor.axis import COLS, ROWS
from ..tensor.quantized_tensor import QuantizedTensorStorage, storage_of
from ..tensor.quantizer import Matrix, Operands, Quantizer
from ..tensor.storage.quantized_tensor_storage import plain_matrix
from .linear_spec import LinearSaved, LinearSpec


def linear_operands(
    x: Tensor | Operands, weight: Tensor, spec: LinearSpec
) -> tuple[Operand, Operand, LinearSaved]:
    """x and weight as the forward product reads them, and as the backward will."""
    if spec.plain:
        matrices, saved = plain_matrices(x, weight, spec)  # pyright: ignore[reportArgumentType]
        return plain(matrices[0]), plain(matrices[1]), saved
    quantized_backward = spec.backward == "quantized"
    if isinstance(x, Operands):
        x_operands = x
    else:
        if spec.communicates:
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
    if offloading.synchronizer is not None:
        keep_weight(saved.weight)
        whole_now(saved.input)
    return x_operands.rowwise, w_operands.rowwise, saved


def plain_matrices(x: Tensor, weight: Tensor, spec: LinearSpec) -> tuple[tuple[Tensor, Tensor], LinearSaved]:
    """x and weight of a plain spec as the product multiplies them, and what the backward reads."""
    dtype = spec.dtype
    if spec.communicates:
        x = spec.parallel.enter_forward(x)
    if weight.dtype != dtype:
        weight = weight.to(dtype)
    saved = LinearSaved(x if spec.needs_grad_weight else None, weight if spec.needs_grad_input else None)
    if offloading.synchronizer is not None:
        keep_weight(saved.weight)
        whole_now(saved.input)
    return (x, weight), saved


def returned(matrix: Tensor, shape: torch.Size, saved: LinearSaved) -> tuple[Tensor, LinearSaved]:
    """x [M, K] in the shape that a caller gets it in, and what is saved where x is: that very tensor.

    Autograd then sees when the caller writes to what the backward reads. A view of it, kept by the node that it comes
    from, would keep the node alive.
    """
    if matrix.shape == shape:
        return matrix, saved
    x = result_in(matrix, shape)
    kept: Matrix | Tensor | None = None
    if saved.input is matrix:
        kept = x
    elif isinstance(saved.input, Matrix) and saved.input.values is matrix:
        kept = Matrix(x)
    if kept is None or torch.compiler.is_compiling():
        return x, saved
    whole_now(kept)
    return x, saved._replace(input=kept)


def input_operands(x: Tensor, quantizer: Quantizer, columnwise: bool) -> Operands:
    """x as the products read it; an input that arrives quantized is taken as it is.

    Where its columns are Hadamard transformed and the gradient's, which they are multiplied with, are not, or the
    other way round, it is quantized again.
    """
    if isinstance(x, QuantizedTensorStorage):
        if not columnwise or storage_of(x).column_signs == quantizer.column_signs:  # pyright: ignore[reportArgumentType]
            return _operands_of(x, columnwise)
        x = plain_matrix(x)
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
        kept_x = Matrix(plain_matrix(x))
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
