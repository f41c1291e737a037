"""Matrices of a linear layer as its products read them: by rows, by columns, or as values."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..distributed.common_scale import with_common_scale
from ..distributed.faults import check_collective
from ..distributed.tensor_parallel import TensorParallel
from ..fast.recorded_collectives import is_symbolic, record_check
from ..fast.recorded_products import SymbolicOperand
from ..fast.symbols import Symbol, TensorLayout
from ..offload.marks import active as offloading
from ..offload.marks import mark_ready
from ..primitives.gemm import as_matrix
from ..primitives.gemm.request import MatrixLayout
from ..primitives.operand import COLUMNWISE, ROWWISE, Operand, plain
from ..primitives.quantize import Cast, dequantize
from ..runtime.tracing import reshape_result
from ..tensor.block_scaling import BlockScalingQuantizer
from ..tensor.quantized_tensor import QuantizedTensorStorage, get_storage
from ..tensor.quantizer import Operands, Quantizer, TransposedValues
from ..tensor.storage.quantized_tensor_storage import plain_matrix
from .linear_spec import (
    DEQUANTIZED,
    HIGH_PRECISION,
    QUANTIZED,
    ROW_CODES,
    LinearSpec,
    gathers_codes,
    gathers_gradient_codes,
    gathers_values,
)


class GradientOperands(NamedTuple):
    """dy [M, N] as the backward products read it: quantized, or its values in a layer that multiplies values.

    A kernel that computes dy can return it in this form instead of values.

    Attributes:
        operands: Row-wise operand [M, N] and column-wise operand [N, M], each possibly a `Pending` gather. None for
            an operand that no product reads, or that is computed from the other one after its gather.
        sums: db [N], the sum of dy over M; None if it is not needed.
    """

    operands: Operands
    sums: Tensor | None


def to_operand(value: Operand | TransposedValues | Tensor | Any) -> Operand:
    """Operand for a product: values [.., K] as a matrix, and transposed `TransposedValues`."""
    operand: Any = value
    if isinstance(value, TransposedValues):
        operand = plain(as_matrix(value.values).t())
    elif isinstance(value, Tensor) or type(value) is Symbol:
        operand = plain(as_matrix(value))  # pyright: ignore[reportArgumentType]
    return SymbolicOperand(*operand) if type(operand.codes) is Symbol else operand


def read_as(value: Any, transposed: bool) -> Any:
    """Operand for a product, as `TransposedValues` for unquantized values that the product reads transposed."""
    return TransposedValues(value) if transposed and isinstance(value, (Tensor, Symbol)) else value  # pyright: ignore


def copied(number: Tensor, like: Any) -> Any:
    """Copy a state tensor float32 [1] that changes before the backward pass reads it.

    Args:
        number: The tensor.
        like: Any tensor of the pass; a `Symbol` if the pass is being recorded.
    """
    if type(like) is not Symbol:
        return number.clone()
    return like.instructions.apply(_clone, [number], [TensorLayout.contiguous((1,), number.dtype)])[
        0
    ]


def _clone(tensor: Tensor) -> tuple[Tensor]:
    return (tensor.clone(),)


def cast_input(x: Any, spec: LinearSpec, rowwise: bool, columnwise: bool) -> Operands:
    """Quantize x [M, K] in the requested directions; a plain layer reads x itself."""
    if spec.is_unquantized:
        return Operands(x, TransposedValues(x))
    shards = spec.parallel if spec.communicates and gathers_codes(spec) else None
    if shards is not None:
        _check_shard(shards, x)
    if isinstance(x, QuantizedTensorStorage):
        return input_operands(x, spec.input_quantizer, columnwise, shards, spec.parallel.size > 1)  # pyright: ignore
    return product_operands(
        spec.input_quantizer, as_matrix(x), rowwise, columnwise, split=spec.parallel.size > 1
    )


def product_operands(
    quantizer: Quantizer, matrix: Tensor, rowwise: bool, columnwise: bool, split: bool
) -> Operands:
    """Return `quantizer.operands`, in the layout that products read; see `BlockScalingQuantizer.product_operands`."""
    if isinstance(quantizer, BlockScalingQuantizer):
        return quantizer.product_operands(matrix, rowwise, columnwise, split)
    return quantizer.operands(matrix, rowwise, columnwise)


def cast_gradient(dy: Any, spec: LinearSpec, rowwise: bool, columnwise: bool) -> Operands:
    """Quantize dy [M, N] in the requested directions; a layer whose backward pass is unquantized reads dy itself."""
    if spec.is_unquantized or spec.backward_operands != QUANTIZED:
        return Operands(dy, TransposedValues(dy))
    if not (rowwise or columnwise):
        return Operands(None, None)
    if spec.communicates and gathers_gradient_codes(spec):
        _check_shard(spec.parallel, dy)
    matrix: Any = dy if isinstance(dy, QuantizedTensorStorage) else as_matrix(dy)
    return product_operands(
        spec.grad_output_quantizer, matrix, rowwise, columnwise, split=spec.parallel.size > 1
    )


def input_cast(spec: LinearSpec) -> Cast | None:
    """Cast with which the kernel that computes x may quantize it; None if the layer must do it.

    It is None if the quantizer cannot run in another kernel, if the layer saves x values, if the backward pass does
    not multiply codes, if values instead of codes are gathered from other ranks, and while a compiler is tracing.
    """
    if spec.is_unquantized or spec.keep_input or spec.backward_operands != QUANTIZED:
        return None
    # A compiler must trace writes to the scaling state.
    if spec.traced or (spec.communicates and gathers_values(spec)):
        return None
    # ROW_CODES: columns are computed from the gathered rows.
    return spec.input_quantizer.cast(
        True, spec.needs_grad_weight and spec.gather_input != ROW_CODES
    )


def gradient_cast(spec: LinearSpec) -> Cast | None:
    """Cast with which the kernel that computes or sums dy may quantize it; None if the layer must do it."""
    if (
        spec.is_unquantized
        or spec.traced
        or spec.backward_operands != QUANTIZED
        or not spec.needs_grad_input
    ):
        return None
    if spec.communicates and spec.parallel.gathers_gradient:
        return None
    return spec.grad_output_quantizer.cast(True, spec.needs_grad_weight)


def _check_shard(parallel: TensorParallel, x: Any) -> None:
    """Compare the quantization of a shard over the ranks: some quantizers take maxima over the ranks."""
    (record_check if is_symbolic(x) else check_collective)(parallel, "quantization of a shard", x)


def dequantized(x: Any, dtype: torch.dtype) -> Tensor:
    """Operand values [M, K] in a dtype, or tensor values in their own dtype."""
    if isinstance(x, TransposedValues):
        return x.values
    if isinstance(x, Operand):
        return x.codes if x.format is None else dequantize(x._replace(dtype=dtype))
    return plain_matrix(x)


def input_to_save(x: Any, x_rows: Any, x_columns: Any, spec: LinearSpec) -> Any:
    """x [M, K] in the form that is saved for dw; None if dw is not needed.

    The form is the column-wise operand, unless a setting requires another one: the values of x, which the backward pass
    quantizes again or multiplies in high precision, or the row-wise codes, which it dequantizes.
    """
    if not spec.needs_grad_weight:
        return None
    saved = x_rows if spec.backward_operands == DEQUANTIZED else x_columns
    if spec.keep_input or spec.backward_operands == HIGH_PRECISION:
        saved = TransposedValues(dequantized(x, spec.dtype))
    if offloading.synchronizer is not None:
        mark_ready(saved)  # an offloading context may begin to copy it to the host
    return saved


def converted(weight: Any, dtype: torch.dtype) -> Tensor:
    """Values of a weight in the dtype of its layer."""
    return (
        weight.dequantize(dtype=dtype)
        if isinstance(weight, QuantizedTensorStorage)
        else weight.to(dtype)
    )


def dense_values(x: Any) -> Tensor:
    """Values, in their shape, that form a matrix with a contiguous axis.

    The gradient of a sum has no contiguous axis, and each reader would copy it.
    """
    if isinstance(x, QuantizedTensorStorage):
        x = x.dequantize()
    return x if x.is_contiguous() else _with_contiguous_axis(x)


def _with_contiguous_axis(x: Tensor) -> Tensor:
    """Return x [.., N], or a contiguous copy if neither axis in the matrix [M, N] is contiguous."""
    matrix = as_matrix(x)
    if not MatrixLayout.of(matrix.shape, matrix.stride()).stride:
        matrix = matrix.contiguous()
    if not matrix.is_contiguous():
        return x  # readers see the matrix as a view of x
    return reshape_result(matrix, x.shape)


def input_operands(
    x: Tensor,
    quantizer: Quantizer,
    columnwise: bool,
    shards: TensorParallel | None = None,
    split: bool = False,
) -> Operands:
    """Return x as the products read it; a quantized input is used without another quantization.

    A quantized input is quantized again if only one of the two column-wise operands of dw, x and dy, is
    Hadamard transformed.

    Args:
        x: Values or a quantized tensor.
        quantizer: Quantizer for values.
        columnwise: The column direction is read too.
        shards: The codes are gathered from the shards on these ranks. A shard that lacks a
            direction is quantized again, and shards of a quantized tensor receive a common scale.
        split: See `BlockScalingQuantizer.product_operands`.
    """
    if isinstance(x, QuantizedTensorStorage) and not quantizer.reads_quantized:
        agrees = not columnwise or get_storage(x).column_signs == quantizer.column_signs  # pyright: ignore
        if agrees and not (shards is not None and _lacks_a_direction(x, columnwise)):
            found = _tensor_operands(x, columnwise)
            return found if shards is None else with_common_scale(found, shards.checked_group())
        x = plain_matrix(x)
    return product_operands(quantizer, x, True, columnwise, split)


def _lacks_a_direction(x: QuantizedTensorStorage, columnwise: bool) -> bool:
    """Return whether x has no codes for a direction that products read, and cannot compute them from the other one."""
    usages = x.get_usages()
    return not x.transposable and not (
        usages["rowwise"] and (usages["columnwise"] or not columnwise)
    )


def weight_operands(weight: Tensor, spec: LinearSpec, columnwise: bool) -> Operands:
    """Return the weight as the products read it: the cached copy, the quantized parameter, or a new quantization."""
    if spec.is_unquantized:
        values = converted(weight, spec.dtype)
        return Operands(values, TransposedValues(values))  # pyright: ignore[reportArgumentType]
    quantizer = spec.weight_quantizer
    quantized = spec.cached_weight is not None or isinstance(weight, QuantizedTensorStorage)
    if quantized or quantizer.is_identity or quantizer.reads_quantized:
        return _weight_as_given(weight, spec, columnwise)
    return product_operands(quantizer, weight, True, columnwise, split=spec.parallel.size > 1)


def _weight_as_given(weight: Tensor, spec: LinearSpec, columnwise: bool) -> Operands:
    """`weight_operands` of a cached copy or a quantized parameter, or by a quantizer that accepts or returns values."""
    if spec.weight_quantizer.reads_quantized:
        if spec.cached_weight is not None:
            return _convert_operands(_directions(spec.cached_weight, columnwise), spec.dtype)
        return _convert_operands(
            spec.weight_quantizer.operands(weight, True, columnwise), spec.dtype
        )
    if spec.cached_weight is not None:
        return _directions(spec.cached_weight, columnwise)
    if not isinstance(weight, QuantizedTensorStorage):
        return spec.weight_quantizer.operands(weight.to(spec.dtype), True, columnwise)
    if spec.weight_quantizer.is_identity:
        values = weight.dequantize(dtype=spec.dtype)  # pyright: ignore[reportCallIssue]
        return Operands(plain(values), TransposedValues(values))
    return _tensor_operands(weight, columnwise)


def _tensor_operands(tensor: QuantizedTensorStorage, columnwise: bool) -> Operands:
    """Return the operands of a quantized tensor, whose columnwise codes are computed if they are missing."""
    if not torch.compiler.is_compiling():
        # Update the tensor itself, so that it caches the new codes. torch.compile traces no tensor methods.
        tensor.update_usage(rowwise_usage=True, columnwise_usage=columnwise or None)
    storage = get_storage(tensor)  # pyright: ignore[reportArgumentType]
    storage.update_usage(rowwise_usage=True, columnwise_usage=columnwise or None)
    return _directions(storage, columnwise)


def _convert_operands(operands: Operands, dtype: torch.dtype) -> Operands:
    """Return the operands with unquantized values converted to the dtype that a layer computes in."""
    rows, columns = operands
    if rows is not None and rows.format is None:
        rows = plain(rows.codes.to(dtype))
    if isinstance(columns, TransposedValues):
        columns = TransposedValues(columns.values.to(dtype))
    elif columns is not None and columns.format is None:
        columns = plain(columns.codes.to(dtype))
    return Operands(rows, columns)


def _directions(storage: QuantizedTensorStorage, columnwise: bool) -> Operands:
    return Operands(storage.contract(ROWWISE), storage.contract(COLUMNWISE) if columnwise else None)
