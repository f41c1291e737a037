"""Collectives in a pass that is being recorded: the generated pass calls them on its tensors.

A collective is a Python function. Recording appends an instruction that calls it, and predicts its
result layouts. Between the two halves of a collective the generated pass holds the pending object.
The recorded functions close over no Symbol, which would keep this call's tensors alive.

Host time gain: 34 % of a column-parallel and a row-parallel Linear with current scaling and
sequence parallelism, 995 us instead of 1514 for a forward and a backward pass with collectives that
do nothing (`benchmarks/fast_pieces.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..distributed.faults import check_collective
from ..distributed.tensor_parallel import TensorParallel
from ..primitives.gemm import Epilogue
from ..primitives.operand import Operand
from ..tensor.quantizer import TransposedValues
from .symbols import NotRecordable, Opaque, Symbol, TensorLayout


def split_symbols(value: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the symbols in a value, and the function that rebuilds the value from tensors."""
    if type(value) is Symbol:
        return [value], lambda parts: parts[0]
    if isinstance(value, TransposedValues):
        return [value.values], lambda parts: TransposedValues(parts[0])
    if type(value) is Operand:  # a subclass with a custom format has other fields
        _, _, tensor_format, _, dtype = value
        symbols: list[Any] = [value.codes, value.scale, value.amax]
        return symbols, lambda parts: Operand(parts[0], parts[1], tensor_format, parts[2], dtype)
    raise NotRecordable(f"a collective sends {type(value).__name__}")


class RecordedPending(NamedTuple):
    """A collective between its halves.

    Attributes:
        started: The pending object in the compiled pass.
        layouts: Layouts of the tensors that the collective makes.
        join: Rebuilds the result from its tensors.
    """

    started: Opaque
    layouts: tuple[TensorLayout, ...]
    join: Callable[[Sequence[Any]], Any]


def is_symbolic(value: Any) -> bool:
    """Return whether a pass buffer consists of symbols."""
    return type(value) in (Symbol, RecordedPending) or (
        isinstance(value, (Operand, TransposedValues)) and type(value[0]) is Symbol
    )


def record_check(parallel: TensorParallel, collective: str, x: Symbol) -> None:
    """Append the comparison of a collective over its ranks; see `check_collective`."""

    def check(tensor: Tensor) -> tuple[()]:
        check_collective(parallel, collective, tensor)
        return ()

    x.instructions.apply(check, [x], [])


def record_begin(
    begin: Callable[[Any], Any], collective: str, x: Any, ranks: int, axis: int
) -> RecordedPending:
    """Append the first half of a collective.

    Args:
        begin: Function from the sent buffer to the pending object.
        collective: "all_gather", "all_reduce" or "reduce_scatter".
        x: The buffer that is sent.
        ranks: Rank count.
        axis: Axis that an all_gather joins.
    """
    sent, join_sent = split_symbols(x)
    (started,) = sent[0].instructions.apply(
        lambda *tensors: (begin(join_sent(tensors)),), sent, [None]
    )
    received, join = sent[:1], join_sent
    if isinstance(x, Operand):
        has_block_scales = x.has_block_scales
        if has_block_scales:
            received.append(x.scale)

        def join_operand(parts: Sequence[Any]) -> Operand:
            return x._replace(codes=parts[0], scale=parts[1] if has_block_scales else x.scale)

        join = join_operand
    layouts = tuple([_result_layout(collective, symbol.layout, ranks, axis) for symbol in received])
    return RecordedPending(started, layouts, join)


def _result_layout(collective: str, layout: TensorLayout, ranks: int, axis: int) -> TensorLayout:
    """TensorLayout of a collective's result."""
    shape = list(layout.shape)
    if collective == "all_gather":
        shape[axis] *= ranks
    elif collective == "reduce_scatter":
        if shape[0] % ranks:
            raise NotRecordable(f"{ranks} ranks do not divide {shape[0]} rows")
        shape[0] //= ranks
    return TensorLayout.contiguous(shape, layout.dtype)


def record_wait(wait: Callable[[Any], Any], pending: RecordedPending) -> Any:
    """Append the second half of a collective, which returns the result of a pending object."""
    instructions = pending.started.instructions
    results = instructions.apply(
        lambda started: _parts(wait(started)), [pending.started], pending.layouts
    )
    return pending.join(results)


def _parts(operand: Any) -> tuple[Any, ...]:
    """Tensors that a collective has computed."""
    if isinstance(operand, Operand):
        return (operand.codes, operand.scale) if operand.has_block_scales else (operand.codes,)
    return (operand,)


def record_gathered_product(
    multiply: Callable[[Any, Any, Any], tuple[Tensor, Any]],
    pending: RecordedPending,
    b: Any,
    epilogue: Epilogue,
    columns: int,
) -> tuple[Any, Any]:
    """Append a product over gathered rows.

    Args:
        multiply: Function (pending object, b, bias) -> (y, gathered matrix).
        pending: The row gather.
        b: The other operand.
        epilogue: Product bias and dtype.
        columns: Product column count.

    Returns:
        y, and the gathered matrix.
    """
    other, join_other = split_symbols(b)
    layout = TensorLayout.contiguous(
        (math.prod(pending.layouts[0].shape[:-1]), columns), epilogue.dtype
    )

    def call(started: Any, bias: Any, *tensors: Any) -> tuple[Any, ...]:
        y, gathered = multiply(started, join_other(tensors), bias)
        return (y, *_parts(gathered))

    y, *gathered = pending.started.instructions.apply(
        call, [pending.started, epilogue.bias, *other], [layout, *pending.layouts]
    )
    return y, pending.join(gathered)


def record_scattered_product(
    multiply: Callable[[Any, Any], Any],
    a: Any,
    b: Any,
    shape: tuple[int, int],
    dtype: torch.dtype,
    ranks: int,
) -> RecordedPending:
    """Append a product whose rows are summed over the ranks.

    Args:
        multiply: Function on both operands that returns the pending object.
        a, b: The operands.
        shape: Product shape.
        dtype: Product dtype.
        ranks: Rank count.
    """
    left, join_left = split_symbols(a)
    right, join_right = split_symbols(b)
    count = len(left)
    (started,) = left[0].instructions.apply(
        lambda *tensors: (multiply(join_left(tensors[:count]), join_right(tensors[count:])),),
        [*left, *right],
        [None],
    )
    layout = _result_layout("reduce_scatter", TensorLayout.contiguous(shape, dtype), ranks, 0)
    return RecordedPending(started, (layout,), lambda parts: parts[0])
