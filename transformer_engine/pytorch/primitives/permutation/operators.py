"""Permutations as a tracing compiler sees them: operators that it does not look into, and room for their results."""

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


def operator_of(request: PermutationRequest) -> Operator:
    """What stands in place of an opaque backend; takes and returns what its callable would."""
    made = _defined[request.operation].given(**_facts(request))
    if request.operation in ("map", "chunks", "segments"):
        return made
    return Operator(functools.partial(_pair, made.call), functools.partial(_pair, made.results))


def _pair(call: Callable[..., list[Tensor]], *tensors: Tensor | None) -> tuple[Tensor, Tensor | None]:
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


def _map(mask: Tensor) -> Tensor:
    return mask.new_empty((mask.shape[0], 2 * mask.shape[1] + 1), dtype=torch.int32)


def _rows_of_segments(segments: Tensor, tokens: int) -> Tensor:
    return segments.new_empty((tokens,), dtype=torch.int32)


def _rows_of_chunks(splits: Tensor, order: Tensor, tokens: int) -> Tensor:
    return _rows_of_segments(splits, tokens)


def _send(
    x: Tensor, map: Tensor, pad_offsets: Tensor | None, probs: Tensor | None, layout: str, tokens: int,
    columns: int, rows: int, every_row: bool,
) -> list[Tensor]:  # fmt: skip
    beside = [] if probs is None else [probs.new_empty(rows)]
    return [x.new_empty(rows, x.shape[1]), *beside]


def _collect(
    y: Tensor, map: Tensor, pad_offsets: Tensor | None, weights: Tensor | None, row_values: Tensor | None,
    layout: str, tokens: int, columns: int,
) -> list[Tensor]:  # fmt: skip
    beside = [] if row_values is None else [row_values.new_empty(tokens, columns)]
    return [y.new_empty(tokens, y.shape[1]), *beside]


def _send_weighted(
    dx: Tensor, map: Tensor, pad_offsets: Tensor | None, weights: Tensor, y: Tensor | None, layout: str,
    tokens: int, columns: int, rows: int,
) -> list[Tensor]:  # fmt: skip
    beside = [] if y is None else [weights.new_empty(tokens, columns)]
    return [dx.new_empty(rows, dx.shape[1]), *beside]


_RESULTS: dict[str, Callable[..., Any]] = {
    "map": _map,
    "chunks": _rows_of_chunks,
    "segments": _rows_of_segments,
    "send": _send,
    "collect": _collect,
    "send_weighted": _send_weighted,
}
