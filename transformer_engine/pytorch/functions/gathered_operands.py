"""x and dy of a linear layer as its products read them, gathered from the ranks that share their rows.

With sequence parallelism each rank has M / ranks rows outside the layer, and the products need all M: for x in a
column-parallel layer, for dy in a row-parallel one. `LinearSpec.gather_input` and `gather_gradient` select
the way:

- "values": gather values; every rank quantizes all rows.
- "codes": each rank quantizes its rows; the codes in each direction are gathered.
- "row_codes": the same, where the column direction is the transposed row direction.
- "once": gather values and save all rows, because they cannot be quantized twice.

The backward pass gathers the saved x rows again, except for "once".
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..offload.marks import active as offloading
from ..primitives.operand import Operand
from ..primitives.transpose import transposed_operand
from ..tensor.quantizer import Operands, TransposedValues
from .communication import Pending, begin
from .deferred_columns import cast_columns
from .linear_operands import (
    GradientOperands,
    cast_gradient,
    cast_input,
    dense_values,
    dequantized,
    input_to_save,
)
from .linear_spec import (
    HIGH_PRECISION,
    ONCE,
    QUANTIZED,
    RECOMPUTED,
    ROW_CODES,
    VALUES,
    LinearSpec,
    gathers_gradient_codes,
)
from .saving import wait_for_saved


def gather_quantized_input(x: Any, spec: LinearSpec) -> tuple[Any, Any]:
    """Quantize x [M, K], where each rank has M / ranks rows; see `linear.quantize_input`.

    Returns:
        (row-wise x, possibly a `Pending` gather; x in the form that is saved for the backward pass).
    """
    way = spec.gather_input
    if way in (VALUES, ONCE):
        return _gather_values(x, spec, way)
    if isinstance(x, Operands):
        x_rows, x_columns = x
    else:
        # The backward pass computes the columns if the values are saved, or if only row-wise codes can be
        # gathered.
        columns = (
            spec.needs_grad_weight and spec.backward_operands == QUANTIZED and not spec.keep_input
        )
        x_rows, x_columns = cast_input(x, spec, True, columns and way != ROW_CODES)
    if way == ROW_CODES:
        x_columns = x_rows  # the backward pass transposes the gathered rows
    # The codes [M / ranks, K] of this rank are sent while the weight is quantized.
    return begin_gather(x_rows, spec), input_to_save(x, x_rows, x_columns, spec)


def _gather_values(x: Any, spec: LinearSpec, way: str) -> tuple[Any, Any]:
    """Gather x [M, K] in high precision and quantize all rows on every rank.

    This rank's x rows are saved and gathered again in the backward pass, or all rows if
    quantization is not repeatable.
    """
    pending = begin_gather(x, spec)
    if spec.is_unquantized and way == VALUES:
        return pending, x if spec.needs_grad_weight else None
    shard, x = x, pending.wait()
    columns = spec.needs_grad_weight and spec.backward_operands == QUANTIZED and not spec.keep_input
    x_rows, x_columns = cast_input(x, spec, True, columns and way == ONCE)
    if way == VALUES:
        return x_rows, shard if spec.needs_grad_weight else None
    return x_rows, input_to_save(x, x_rows, x_columns, spec)


def begin_gather_gradient(dy: Any, spec: LinearSpec) -> GradientOperands | Tensor:
    """Gather dy [M / ranks, N] from all ranks, as codes or as values.

    Returns:
        Operands of dy [M, N], each possibly a `Pending` gather; or the gathered values, which each
        rank quantizes.
    """
    quantizes = spec.backward_operands == QUANTIZED and not spec.is_unquantized
    if quantizes and gathers_gradient_codes(spec):
        return GradientOperands(_gather_gradient_codes(dy, spec), None)
    pending = begin_gather(dy, spec, dense=True)
    if not quantizes and spec.needs_grad_input and not spec.needs_grad_bias:
        # The dx product may begin with the rows that have arrived; `gather_columns` reads the gathered rows.
        return GradientOperands(Operands(pending, None), None)  # pyright: ignore[reportArgumentType]
    return pending.wait()


def _gather_gradient_codes(dy: Any, spec: LinearSpec) -> Operands:
    """Quantize this rank's rows of dy [M / ranks, N] and begin to gather the codes in each direction that is read."""
    if not (spec.needs_grad_input or spec.needs_grad_weight):
        return Operands(None, None)
    by_rows = spec.gather_gradient == ROW_CODES
    rowwise, columnwise = spec.needs_grad_input or by_rows, spec.needs_grad_weight and not by_rows
    rows: Any
    columns: Any
    rows, columns = cast_gradient(dense_values(dy), spec, rowwise, columnwise)
    rows = begin_gather(rows, spec) if rowwise else None
    columns = begin_gather(columns, spec, axis=1) if columnwise else None
    if rows is not None and not spec.needs_grad_input:
        rows = rows.wait()
    return Operands(rows, columns)


def gather_columns(columns: Any, rows: Any) -> Any:
    """Column-wise operand [K, M]: gathered, or transposed gathered rows [M, K] if `columns` is None."""
    if isinstance(columns, Pending):
        return columns.wait()
    if columns is not None:
        return columns
    return transposed_operand(rows) if isinstance(rows, Operand) else TransposedValues(rows)


def saves_input_shard(spec: LinearSpec) -> bool:
    """Whether the backward pass gathers the x shard that the forward pass has saved."""
    return spec.needs_grad_weight and spec.parallel.gathers_input and spec.gather_input != ONCE


def begin_gather_saved(x: Any, spec: LinearSpec) -> Pending:
    """Begin to gather the saved x rows: values, codes by rows, or codes by columns [K, M / ranks]."""
    if offloading.used:
        wait_for_saved(x)
    if spec.backward_operands != QUANTIZED or spec.gather_input == VALUES:
        return begin_gather(x.values if isinstance(x, TransposedValues) else x, spec)
    by_rows = spec.gather_input == ROW_CODES
    if spec.keep_input:
        rows, columns = cast_input(x.values, spec, by_rows, not by_rows)
        x = rows if by_rows else columns
    return begin_gather(x, spec, axis=0 if by_rows else 1)


def input_column_operand(x: Any, spec: LinearSpec) -> Any:
    """x [M, K] as dw reads it: the column-wise operand of its saved form, or values that an override multiplies."""
    way = spec.gather_input if isinstance(x, Pending) else None
    x = x.wait() if isinstance(x, Pending) else x
    if way is None and offloading.used:
        wait_for_saved(x)
    if spec.input_columns == RECOMPUTED:
        return cast_columns(x, spec.input_quantizer)
    keeps_values = spec.keep_input or spec.backward_operands == HIGH_PRECISION
    if keeps_values and (way == VALUES or isinstance(x, TransposedValues)):
        x = dequantized(x, spec.dtype)
    if spec.backward_operands != QUANTIZED:
        if way == VALUES and not keeps_values:
            # The forward pass multiplied these codes; the backward pass multiplies their values.
            x, _ = cast_input(x, spec, True, False)
        return TransposedValues(dequantized(x, spec.dtype))
    if way == ROW_CODES:
        return transposed_operand(x)
    if way == VALUES or (way is None and spec.keep_input):
        return cast_input(x, spec, False, True)[1]
    return x


def begin_gather(x: Any, spec: LinearSpec, axis: int = 0, dense: bool = False) -> Pending:
    """Begin to gather x along an axis; `dense` gathers values with a contiguous axis."""
    overlaps = spec.parallel.overlap.gather and not spec.traced and not axis
    return begin("all_gather", x, spec.parallel, axis, overlaps, dense)
