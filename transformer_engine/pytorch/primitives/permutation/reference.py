"""Token permutations in float32 torch operations with fixed shapes, on any device, by the token of every row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common.dispatch import Backend
from ...runtime.tracing import cast_result, reshape_result

MASK, INDEX = "mask", "index"


class Routes(NamedTuple):
    """Token rows; a route of a token has a row and a column in the probabilities [T, columns].

    Attributes:
        map: Layout MASK: int32 [T, 2 E + 1]. A token's rows are at 0, the highest first, their
            experts at E, and their number at 2 E; other cells are arbitrary. Layout INDEX: int32 [J
            * T], with the row for token t's route j at j * T + t, or -1 if the route is dropped.
        layout: MASK, where a column is an expert, or INDEX, where column j belongs to route j.
        tokens: Token count.
        columns: Column count.
        pad_offsets: Layout MASK: int64 [E], the experts' row offsets.
    """

    map: Tensor
    layout: str
    tokens: int
    columns: int
    pad_offsets: Tensor | None = None


class PermutationRequest(NamedTuple):
    """One operation on routes.

    Attributes:
        operation: Operation name.
        shape: Shape of the mask, the chunks [T, N] or the tokens [T, H].
        rows: Permuted token count.
        weights: Dtype of the probabilities, or the values per row.
        every_row: Whether every row receives a token.
        strides: Mask strides.
    """

    operation: str
    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    layout: str = MASK
    rows: int = 0
    columns: int = 0
    weights: torch.dtype | None = None
    every_row: bool = False
    strides: tuple[int, int] = (0, 0)


def bind(request: PermutationRequest) -> Callable[..., Any]:
    """Return the operation as a callable on the tensors that `__init__` passes."""
    if request.operation == "map":
        return map_of_mask
    if request.operation == "chunks":
        return lambda splits, order: map_of_chunks(splits, order, request.shape[0])
    if request.operation == "segments":
        return lambda segments: map_of_segments(segments, request.shape[0])
    operation = {"send": send, "collect": collect, "send_weighted": send_weighted}[
        request.operation
    ]
    layout, tokens, columns, rows = request.layout, request.shape[0], request.columns, request.rows

    def compute(x: Tensor, map: Tensor, pad_offsets: Tensor | None, *others: Tensor | None) -> Any:
        return operation(x, Routes(map, layout, tokens, columns, pad_offsets), rows, *others)

    return compute


def map_of_mask(mask: Tensor) -> Tensor:
    """Return int32 [T, 2 E + 1] for a mask [T, E]; -1 in unused cells."""
    tokens, experts = mask.shape
    ones = (mask != 0).long()
    counts = ones.sum(0)
    rows = (counts.cumsum(0) - counts) + ones.cumsum(0) - ones
    number = ones.sum(1, keepdim=True)
    # the last cell is sliced off
    cell = torch.where(ones != 0, number - ones.cumsum(1), 2 * experts + 1)
    cells = torch.full((tokens, 2 * experts + 2), -1, dtype=torch.int32, device=mask.device)
    expert = torch.arange(experts, dtype=torch.int32, device=mask.device).expand(tokens, experts)
    cells.scatter_(1, cell, rows.int())
    cells.scatter_(1, torch.where(ones != 0, cell + experts, cell), expert)
    cells.narrow(1, 2 * experts, 1).copy_(number)
    return cells[:, : 2 * experts + 1].contiguous()


def map_of_chunks(splits: Tensor, order: Tensor, tokens: int) -> Tensor:
    """Return the map by index [T]: chunk order[i] with splits rows moves to place i."""
    splits, order = splits.long(), order.long()
    starts = splits.cumsum(0) - splits
    sizes = splits[order]
    return map_of_segments(torch.stack((starts[order], sizes, sizes.cumsum(0) - sizes)), tokens)


def map_of_segments(segments: Tensor, tokens: int) -> Tensor:
    """Return the map by index [T]: a row moves with its segment (first row, rows, first row in the result)."""
    begin, size, target = segments.long().unbind(0)
    row = torch.arange(tokens, device=segments.device)
    within = row[:, None] - begin
    holds = (within >= 0) & (within < size)
    return (row + torch.where(holds, target - begin, 0).sum(1)).int()


def send(
    x: Tensor, routes: Routes, rows: int, probs: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return y [rows, H] and row_probs [rows]; zero if a row's probability is 0, or for a row without a token."""
    token, column = _origins(routes, rows)
    y = _with_zero(x)[token]
    if probs is None:
        return y, None
    row_probs = _with_zero(probs)[token, column]
    return torch.where((row_probs == 0)[:, None], torch.zeros_like(y), y), row_probs


def collect(
    y: Tensor, routes: Routes, rows: int, weights: Tensor | None, row_values: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return x [T, H] = sum of weight * y, and values [T, columns] from row_values."""
    token, column = _origins(routes, rows)
    wide = _wide(y)
    if weights is not None:
        wide = wide * _with_zero(_wide(weights))[token, column][:, None].to(wide.dtype)
    total = wide.new_zeros(routes.tokens + 1, y.shape[1]).index_add_(0, token, wide)
    sums = total[: routes.tokens]
    x = cast_result(reshape_result(sums, sums.shape), y.dtype)
    return x, None if row_values is None else _index_by_column(row_values, token, column, routes)


def send_weighted(
    dx: Tensor, routes: Routes, rows: int, weights: Tensor, y: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return dy [rows, H] = weight * dx, and the weights' gradient [T, columns] = sum(y * dx), None without y."""
    token, column = _origins(routes, rows)
    gradient = _with_zero(_wide(dx))[token]
    weight = _with_zero(_wide(weights))[token, column][:, None].to(gradient.dtype)
    dy = (gradient * weight).to(dx.dtype)
    if y is None:
        return dy, None
    sums = (gradient * y.to(gradient.dtype)).sum(1)
    return dy, _index_by_column(sums, token, column, routes).to(weights.dtype)


def _origins(routes: Routes, rows: int) -> tuple[Tensor, Tensor]:
    """Return the token (T for a row without a token) and column of every row."""
    tokens, columns, device = routes.tokens, routes.columns, routes.map.device
    if routes.layout == MASK:
        cells = routes.map.long()
        valid = torch.arange(columns, device=device) < cells[:, 2 * columns :]
        column = torch.where(valid, cells[:, columns : 2 * columns], 0)
        row = cells[:, :columns]
        if routes.pad_offsets is not None:
            row = row + routes.pad_offsets[column]
        token = torch.arange(tokens, device=device)[:, None].expand(tokens, columns)
    else:
        row = routes.map.long().view(columns, tokens)
        valid = row >= 0
        column = torch.arange(columns, device=device)[:, None].expand(columns, tokens)
        token = torch.arange(tokens, device=device).expand(columns, tokens)
    # the last element is sliced off
    target = torch.where(valid & (row >= 0) & (row < rows), row, rows).reshape(-1)
    tokens_of = torch.full((rows + 1,), tokens, device=device)
    columns_of = torch.zeros(rows + 1, dtype=torch.long, device=device)
    tokens_of = tokens_of.scatter(0, target, token.reshape(-1))[:rows]
    return tokens_of, columns_of.scatter(0, target, column.reshape(-1))[:rows]


def _index_by_column(values: Tensor, token: Tensor, column: Tensor, routes: Routes) -> Tensor:
    """Return [T, columns] with the value of each route's row, 0 for absent routes."""
    full = values.new_zeros(routes.tokens + 1, routes.columns)
    return full.index_put((token, column), values)[: routes.tokens]


def _with_zero(x: Tensor) -> Tensor:
    """Return x followed by a zero row."""
    return torch.cat((x, x.new_zeros(1, x.shape[1])))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


BACKEND: Backend[PermutationRequest] = Backend("reference", bind=bind)
