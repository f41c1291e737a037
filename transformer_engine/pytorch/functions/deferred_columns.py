"""Columns of a linear layer's operands, cast by the backward pass from values that are in memory in any case.

The weight gradient reads x [M, K] by columns, and the input gradient reads the weight [N, K] by columns. A
product that cannot read row-wise codes in the other direction needs transposed codes, one byte per element.

| mode of `weight_columns`, `input_columns` | the copy |
| --- | --- |
| `recomputed` | the backward pass casts the values again, with the scale of the forward pass |
| `saved` | the cast of the forward pass writes both directions, and the copy is in memory until the backward pass |

| mode of `norm_columns` | the copy of the codes of a norm's output |
| --- | --- |
| `saved` (default) | as above |
| `recomputed` | the backward pass computes the output of an RMSNorm again and casts it: 6 more bytes per element |

The values are a parameter, or an attention output, which the attention's own backward pass reads. Both modes
have the same bits. `recomputed` reads the values once more, 2 bytes per element in bfloat16.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common.dispatch import Backend, Table, interventions
from ...common.formats import FLOAT8
from ..offload.marks import active as offloading
from ..offload.marks import mark_ready
from ..primitives.gemm import as_matrix
from ..primitives.operand import Operand
from ..primitives.quantize import Cast, Quantized, quantize, quantize_as
from ..tensor.quantizer import Quantizer, TransposedValues
from .linear_operands import copied, dequantized
from .linear_spec import (
    DEQUANTIZED,
    PRODUCED,
    QUANTIZED,
    RECOMPUTED,
    SAVED,
    LinearSpec,
    replace_fields,
)
from .saving import DeferredColumns, wait_for_saved

# Reading a weight once more takes 1.3 % of the time for its three products with 8,192 rows, 6 *
# 8,192 FLOP per element, and 0.6 % with 16,384 rows (H200: 4.2 TB/s, 1.3 PFLOP/s).
_FEWEST_ROWS = 16384
# Smaller copies are saved: launching a cast takes as long as casting so many elements.
_FEWEST_ELEMENTS = 2**21


class OperandColumns(NamedTuple):
    """An operand of a linear layer that a product of the backward pass reads by columns.

    Attributes:
        elements: Operand elements.
        rows: Rows in the layer's input, which determine how long its products take.
        quantized: The backward pass multiplies codes.
        one_scale: The codes have one scale, which the forward pass can save.
        copied: The columns are a copy of the codes, not a view of the row-wise codes.
        in_memory: Something else has the values in memory until the backward pass.
        communicates: The layer exchanges values or codes with other ranks.
        cached: The codes are cached for several microbatches, so that a later cast may have other values and scales.
    """

    elements: int
    rows: int
    quantized: bool
    one_scale: bool
    copied: bool
    in_memory: bool
    communicates: bool
    cached: bool = False


def _unsupported(columns: OperandColumns) -> str | None:
    """Reason why the backward pass does not cast the columns."""
    if not columns.quantized:
        return "the backward pass does not multiply codes"
    if columns.communicates:
        return "the layer exchanges values with other ranks between its products"
    if columns.cached:
        return "the weight is quantized once for several microbatches (is_first_microbatch)"
    if not columns.in_memory:
        return "the values are not in memory until the backward pass"
    if not columns.one_scale:
        return "only codes with one scale are cast again"
    if not columns.copied:
        return "products read the codes by rows in both directions"
    return None


def _order(fewest_rows: int, columns: OperandColumns) -> tuple[str, str]:
    """Modes in preference order."""
    pays = columns.elements >= _FEWEST_ELEMENTS and columns.rows >= fewest_rows
    return (RECOMPUTED, SAVED) if pays else (SAVED, RECOMPUTED)


def _weight_order(columns: OperandColumns) -> tuple[str, str]:
    return _order(_FEWEST_ROWS, columns)


def _input_order(columns: OperandColumns) -> tuple[str, str]:
    return _order(0, columns)


_MODES = (Backend(RECOMPUTED, unsupported_reason=_unsupported), Backend[OperandColumns](SAVED))
NORM_COLUMNS: Table[OperandColumns] = Table("norm_columns", _MODES[::-1], describe=OperandColumns)
WEIGHT_COLUMNS: Table[OperandColumns] = Table(
    "weight_columns", _MODES, describe=OperandColumns, order=_weight_order
)
INPUT_COLUMNS: Table[OperandColumns] = Table(
    "input_columns", _MODES, describe=OperandColumns, order=_input_order
)


def with_deferred_columns(
    spec: LinearSpec,
    rows: int,
    weight: torch.Size,
    keeps_weight: bool,
    keeps_input: bool,
    caches: bool,
) -> LinearSpec:
    """Return the spec with the modes for its weight and input columns.

    Args:
        spec: The spec.
        rows: Input rows.
        weight: Weight shape.
        keeps_weight: The weight is an unquantized parameter.
        keeps_input: Another operation saves the input values.
        caches: The call quantizes the weight into a cache, or reads the cache.
    """
    # a compiler must see writes to the scaling state, and no size guards
    if spec.is_unquantized or spec.traced:
        return spec
    if max(weight.numel(), rows * weight[-1]) < _FEWEST_ELEMENTS and not interventions:
        return spec  # saved, without spending time on a choice
    found: dict[str, str] = {}
    if spec.needs_grad_input:
        request = _columns(
            spec, spec.weight_quantizer, (weight.numel(), rows), keeps_weight
        )._replace(cached=caches)
        found["weight_columns"] = WEIGHT_COLUMNS.choose(request)
    if spec.needs_grad_weight and keeps_input:
        request = _columns(
            spec, spec.input_quantizer, (rows * weight[-1], rows), not spec.keep_input
        )
        found["input_columns"] = INPUT_COLUMNS.choose(request)
    return replace_fields(spec, **found) if found else spec


def with_norm_columns(spec: LinearSpec, computed_again: bool) -> LinearSpec:
    """Return the spec for a linear layer after a norm with the mode for the norm output's columns.

    Args:
        spec: The spec.
        computed_again: The backward pass can compute the output again: for an RMSNorm whose kernel quantizes it.
    """
    if (
        spec.is_unquantized
        or spec.traced
        or not interventions
        or not (spec.needs_grad_input and spec.needs_grad_weight)
    ):
        return spec
    mode = NORM_COLUMNS.choose(_columns(spec, spec.input_quantizer, (0, 0), computed_again))
    return replace_fields(spec, input_columns=PRODUCED) if mode == RECOMPUTED else spec


def save_multiplier_or_amax(cast: Cast, codes: Quantized, like: Any) -> Tensor:
    """Copy of the multiplier, or the amax, with which `cast_columns` computes the columns later."""
    saved = codes.amax if cast.multiplier is None else copied(cast.multiplier, like)
    assert saved is not None
    return saved


def _columns(
    spec: LinearSpec, quantizer: Quantizer, size: tuple[int, int], in_memory: bool
) -> OperandColumns:
    quantized = spec.backward_operands == QUANTIZED
    cast = quantizer.cast(True, True) if quantized and in_memory else None
    return OperandColumns(
        *size,
        quantized=quantized,
        one_scale=cast is not None and cast.spec.format == FLOAT8,
        copied=cast is not None and cast.spec.columnwise,
        in_memory=in_memory,
        communicates=spec.communicates,
    )


def cast_rows(x: Any, quantizer: Quantizer) -> tuple[Operand | None, DeferredColumns]:
    """Quantize x [M, K] by rows; return its row-wise operand and the values and scale for its columns."""
    cast = quantizer.cast(True, False)
    assert cast is not None
    if offloading.synchronizer is not None:
        mark_ready(x)
    codes = quantize_as(as_matrix(x), cast)
    saved = save_multiplier_or_amax(cast, codes, x)
    return quantizer.adopt(codes, x.dtype).rowwise, DeferredColumns(x, saved)


def cast_columns(x: Any, quantizer: Quantizer) -> Operand | TransposedValues | None:
    """Quantize `DeferredColumns` of [M, K] with the forward-pass scale; return the operand [K, M]."""
    cast = quantizer.cast(False, True)
    assert cast is not None
    if offloading.used:
        wait_for_saved(x.values)
    values = as_matrix(x.values)
    saved = x.multiplier_or_amax
    multiplier, amax = (None, saved) if cast.multiplier is None else (saved, None)
    codes = quantize(values, cast.spec, multiplier=multiplier, amax=amax)
    return quantizer.adopt(codes, values.dtype).columnwise


def weight_column_operand(weight: Any, spec: LinearSpec) -> Any:
    """Weight [N, K] as dx reads it: the column-wise operand of its saved form, or its decoded row-wise codes."""
    if offloading.used:
        wait_for_saved(weight)
    if spec.weight_columns == RECOMPUTED:
        return cast_columns(weight, spec.weight_quantizer)
    return (
        TransposedValues(dequantized(weight, spec.dtype))
        if spec.backward_operands == DEQUANTIZED
        else weight
    )
