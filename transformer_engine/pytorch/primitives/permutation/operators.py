"""Permutation operators for torch.compile, and their result allocation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ....common.dispatch import Operator
from ...runtime.launching import TorchOperator, operator
from .reference import PermutationRequest

_PLACE = "str layout, SymInt tokens, SymInt columns"
_SCHEMAS = {
    "map": "moe_rows_of_mask(Tensor mask) -> Tensor",
    "chunks": "moe_rows_of_chunks(Tensor splits, Tensor order, SymInt tokens) -> Tensor",
    "segments": "moe_rows_of_segments(Tensor segments, SymInt tokens) -> Tensor",
    "send": f"moe_send(Tensor x, Tensor map, Tensor? pad_offsets, Tensor? probs, {_PLACE}, SymInt rows, "
    "bool every_row) -> Tensor[]",
    "collect": "moe_collect(Tensor y, Tensor map, Tensor? pad_offsets, Tensor? weights, Tensor? row_values, "
    f"{_PLACE}) -> Tensor[]",
    "send_weighted": "moe_send_weighted(Tensor dx, Tensor map, Tensor? pad_offsets, Tensor weights, Tensor? y, "
    f"{_PLACE}, SymInt rows) -> Tensor[]",
}
_defined: dict[str, TorchOperator] = {}


def define(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Register the operators, by the public functions that they run; once."""
    for name, function in functions.items():
        _defined[name] = operator(_SCHEMAS[name], function, _RESULTS[name])


def make_operator(request: PermutationRequest) -> Operator:
    """Return the operator for an opaque backend, with the arguments and results of its callable."""
    operator = _defined[request.operation].given(**_facts(request))
    if request.operation in ("map", "chunks", "segments"):
        return operator
    return Operator(
        functools.partial(_pair, operator.call), functools.partial(_pair, operator.results)
    )


def _pair(
    call: Callable[..., list[Tensor]], *tensors: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    results = call(*tensors)
    return results[0], results[1] if len(results) > 1 else None


def _facts(request: PermutationRequest) -> dict[str, Any]:
    if request.operation == "map":
        return {}
    if request.operation in ("chunks", "segments"):
        return {"tokens": request.shape[0]}
    facts = {"layout": request.layout, "tokens": request.shape[0], "columns": request.columns}
    if request.operation != "collect":
        facts |= {"rows": request.rows}
    if request.operation == "send":
        facts |= {"every_row": request.every_row}
    return facts


def _with_optional(first: Tensor, like: Tensor | None, *shape: int) -> list[Tensor]:
    """Return the first result and, if there is a tensor like it, an optional second one."""
    return [first] if like is None else [first, like.new_empty(shape)]


_RESULTS: dict[str, Callable[..., Any]] = {
    "map": lambda mask: mask.new_empty((mask.shape[0], 2 * mask.shape[1] + 1), dtype=torch.int32),
    "chunks": lambda splits, order, tokens: splits.new_empty((tokens,), dtype=torch.int32),
    "segments": lambda segments, tokens: segments.new_empty((tokens,), dtype=torch.int32),
    "send": lambda x, map, pad_offsets, probs, layout, tokens, columns, rows, every_row: (
        _with_optional(x.new_empty(rows, x.shape[1]), probs, rows)
    ),
    "collect": lambda y, map, pad_offsets, weights, row_values, layout, tokens, columns: (
        _with_optional(y.new_empty(tokens, y.shape[1]), row_values, tokens, columns)
    ),
    "send_weighted": lambda dx, map, pad_offsets, weights, y, layout, tokens, columns, rows: (
        _with_optional(
            dx.new_empty(rows, dx.shape[1]), None if y is None else weights, tokens, columns
        )
    ),
}
