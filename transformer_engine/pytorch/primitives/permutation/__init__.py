"""y[row of a route] = x[its token], and its inverse: tokens [T, H] in expert order; backend table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....common.dispatch import Table
from . import reference, triton
from .operators import define, make_operator
from .reference import INDEX, MASK, PermutationRequest, Routes

__all__ = [
    "INDEX",
    "MASK",
    "TABLE",
    "PermutationRequest",
    "Routes",
    "collect",
    "rows_of_chunks",
    "rows_of_indices",
    "rows_of_mask",
    "rows_of_segments",
    "send",
    "send_weighted",
]


def rows_of_mask(mask: Tensor) -> Tensor:
    """Return the map by mask, int32 [T, 2 E + 1], for a mask [T, E]: not 0 if an expert processes a token.

    Rows are ordered by expert, then by token.
    """
    key = ("map", mask.shape, mask.dtype, mask.device, MASK, 0, 0, None, False, mask.stride())
    return TABLE.bound(key)(mask)


def rows_of_indices(experts: Tensor, rows: int) -> Tensor:
    """Return the map by index, int32 [J * T], for the experts [T, J] of each token.

    Rows are ordered by expert, then by token and route. Routes to expert -1 and routes beyond the last row are dropped,
    -1.
    """
    last = torch.iinfo(experts.dtype).max
    flat = experts.reshape(-1)
    # torch's radix sort on a GPU, without synchronization
    ordered, order = torch.where(flat < 0, last, flat).sort(stable=True)
    row = torch.arange(order.shape[0], dtype=torch.int32, device=experts.device)
    row = torch.where((row < rows) & (ordered != last), row, -1)
    return torch.empty_like(row).scatter_(0, order, row).view(experts.shape).t().reshape(-1)


def rows_of_chunks(splits: Tensor, order: Tensor, tokens: int) -> Tensor:
    """Return the map by index, int32 [T], that moves chunk order[i] with splits rows to place i; other rows stay."""
    key = ("chunks", (tokens, splits.shape[0]), splits.dtype, splits.device)
    return TABLE.bound(key)(splits, order)


def rows_of_segments(segments: Tensor, tokens: int) -> Tensor:
    """Return the map by index, int32 [T]; segments int32 [3, N] are first row, rows, and first row in the result."""
    key = ("segments", (tokens, segments.shape[1]), segments.dtype, segments.device)
    return TABLE.bound(key)(segments)


def send(
    x: Tensor, routes: Routes, rows: int, probs: Tensor | None = None, *, every_row: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return y [rows, H] and row_probs [rows]: y[row] = x[token], row_probs[row] = probs[token, column].

    A row without a token is zero, and with probs also a row with probability 0.

    Args:
        x: Tokens [T, H].
        routes: Token rows.
        rows: Number of rows of y.
        probs: Probabilities [T, columns], or None.
        every_row: Every row receives a token, so that rows are not checked.
    """
    key = _key("send", (routes.tokens, x.shape[1]), x, routes, rows, probs, every_row)
    return TABLE.bound(key)(x, routes.map, routes.pad_offsets, probs)


def collect(
    y: Tensor, routes: Routes, weights: Tensor | None = None, row_values: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return x [T, H] and values [T, columns]: x[t] = sum over routes of weights[t, column] * y[row], in float32.

    values[t, column] = row_values[row], 0 for a token without such a route.
    """
    extra = weights if row_values is None else row_values
    key = _key("collect", (routes.tokens, y.shape[1]), y, routes, y.shape[0], extra, False)
    return TABLE.bound(key)(y, routes.map, routes.pad_offsets, weights, row_values)


def send_weighted(
    dx: Tensor, routes: Routes, rows: int, weights: Tensor, y: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return `collect`'s gradients dy [rows, H] = weight * dx[token], dweights [T, columns] = sum(y[row] * dx[token]).

    Args:
        dx: Gradient [T, H].
        routes: Token rows.
        rows: Row count.
        weights: Weights [T, columns].
        y: Rows [rows, H]; None if the weights need no gradient.
    """
    extra = None if y is None else weights
    key = _key("send_weighted", (routes.tokens, dx.shape[1]), dx, routes, rows, extra, False)
    return TABLE.bound(key)(dx, routes.map, routes.pad_offsets, weights, y)


def _key(
    operation: str,
    shape: tuple[int, int],
    x: Tensor,
    routes: Routes,
    rows: int,
    weights: Tensor | None,
    every_row: bool,
) -> tuple[Any, ...]:
    dtype = None if weights is None else weights.dtype
    return (
        operation,
        shape,
        x.dtype,
        x.device,
        routes.layout,
        rows,
        routes.columns,
        dtype,
        every_row,
    )


TABLE: Table[PermutationRequest] = Table(
    "permutation",
    (triton.BACKEND, reference.BACKEND),
    describe=PermutationRequest,
    operator=make_operator,
)


def _send(
    x: Tensor, map: Tensor, pad_offsets: Tensor | None, probs: Tensor | None, *facts: Any
) -> list[Tensor]:
    layout, tokens, columns, rows, every_row = facts
    routes = Routes(map, layout, tokens, columns, pad_offsets)
    return [
        result for result in send(x, routes, rows, probs, every_row=every_row) if result is not None
    ]


def _collect(
    y: Tensor,
    map: Tensor,
    pad_offsets: Tensor | None,
    weights: Tensor | None,
    row_values: Tensor | None,
    *facts: Any,
) -> list[Tensor]:
    layout, tokens, columns = facts
    routes = Routes(map, layout, tokens, columns, pad_offsets)
    return [result for result in collect(y, routes, weights, row_values) if result is not None]


def _send_weighted(
    dx: Tensor,
    map: Tensor,
    pad_offsets: Tensor | None,
    weights: Tensor,
    y: Tensor | None,
    *facts: Any,
) -> list[Tensor]:
    layout, tokens, columns, rows = facts
    results = send_weighted(dx, Routes(map, layout, tokens, columns, pad_offsets), rows, weights, y)
    return [tensor for tensor in results if tensor is not None]


define(
    {
        "map": rows_of_mask,
        "chunks": rows_of_chunks,
        "segments": rows_of_segments,
        "send": _send,
        "collect": _collect,
        "send_weighted": _send_weighted,
    }
)
