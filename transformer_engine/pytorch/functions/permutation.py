"""Tokens [T, H] sent to expert rows and collected from them, differentiable in tokens and probabilities.

Quantized tokens are moved as codes and scales: their rows must not share a scale's block with other
rows. Row groups are padded, and their padding removed, in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ...common.numbers import with_article
from ..primitives.grouped_gemm.groups import cached_on_device
from ..primitives.operand import ROWWISE
from ..primitives.permutation import (
    INDEX,
    MASK,
    Routes,
    collect,
    rows_of_segments,
    send,
    send_weighted,
)
from ..primitives.quantize import Quantized
from ..primitives.scale_order import row_major
from ..runtime.autograd import Function
from ..runtime.double_backward import once_differentiable
from ..tensor import QuantizedTensor
from ..tensor.storage.block_scaled import BlockScaledStorage


def permute(
    x: Tensor, routes: Routes, rows: int, probs: Tensor | None = None, *, every_row: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(y [rows, H], row_probs [rows]): y[row] = x[token]; see `primitives.permutation.send`.

    The gradient of x sums its row gradients, whatever their probability; the gradient of probs [T,
    columns] is 0 where a token has no such route.
    """
    if probs is None:
        return _Permute.apply(x, routes, rows, every_row), None
    return _PermuteWithProbs.apply(x, probs, routes, rows, every_row)


def unpermute(y: Tensor, routes: Routes, probs: Tensor | None = None) -> Tensor:
    """x [T, H] = sum over a token's rows of probs[t, column] * y[row], in float32, in y's dtype."""
    if probs is None:
        return _Unpermute.apply(y, routes)
    return _Merge.apply(y, probs, routes)


def unsupported_rows_reason(x: Tensor) -> str | None:
    """Return why the rows of a quantized tensor cannot be moved; None for rows that can, and for plain tensors."""
    if not isinstance(x, QuantizedTensor):
        return None
    if torch.compiler.is_compiling():
        return "its codes are moved in eager mode only; dequantize() it in compiled code"
    block = getattr(x, "format", None) and x.format.block
    if block is not None and block[0] > 1:
        return f"{block[0]} rows of {x.format.name} share a scale; quantize it in blocks of one row"
    if not x.get_usages()["rowwise"]:
        return "it has no row-wise data; quantize it with rowwise=True"
    return None


def _sent(
    x: Tensor, routes: Routes, rows: int, probs: Tensor | None, every_row: bool
) -> tuple[Tensor, Tensor | None]:
    """`send` for plain or quantized tokens."""
    if not isinstance(x, QuantizedTensor):
        return send(x, routes, rows, probs, every_row=every_row)
    operand = row_major(x.contract(ROWWISE))
    codes, row_probs = send(_bytes(operand.codes), routes, rows, probs, every_row=every_row)
    scale = operand.scale
    if scale is not None and operand.format is not None and operand.format.block is not None:
        scale = send(_bytes(scale), routes, rows, None, every_row=every_row)[0].view(scale.dtype)
    amax = operand.amax
    if amax is not None and operand.format is not None and operand.format.row_scaled:
        amax = send(amax.view(-1, 1), routes, rows, None, every_row=every_row)[0]
    moved = Quantized(codes.view(operand.codes.dtype), scale, None, None, amax, None)
    constants = {**x.constants(), "quantizer": None}
    if "square_tiles" in constants:  # rows in a tile have parted
        constants["square_tiles"] = False
    if "with_gemm_swizzled_scales" in constants:  # rows in a scale tile, too
        constants["with_gemm_swizzled_scales"] = False
    storage = x.storage_class().pack(moved, (rows, x.shape[-1]), **constants)
    if isinstance(storage, BlockScaledStorage):
        storage.trim_rowwise_scales()
    return type(x).from_storage(storage), row_probs


def _bytes(x: Tensor) -> Tensor:
    """Return codes and scales in a dtype that kernels can move; float32 scales are unchanged."""
    return x.contiguous() if x.dtype is torch.float32 else x.contiguous().view(torch.uint8)


def _plain(name: str, gradient: Tensor) -> Tensor:
    if isinstance(gradient, QuantizedTensor):
        raise TypeError(
            f"the gradient of {name} is {with_article(type(gradient))}, which cannot be added up; dequantize() it"
        )
    return gradient


def _save_routes(ctx: Any, routes: Routes, *tensors: Tensor | None) -> None:
    """Save the tensors and the routes, whose numbers the backward pass reads from the map's shape.

    A size that no forward step reads gets lost if a compiler stores it with tensors (torch 2.13, dynamic shapes).
    """
    map = routes.map if routes.layout == MASK else routes.map.view(routes.columns, routes.tokens)
    ctx.save_for_backward(map, routes.pad_offsets, *tensors)
    ctx.layout = routes.layout


def _load_routes(ctx: Any) -> tuple[Routes, tuple[Tensor, ...]]:
    map, pad_offsets, *tensors = ctx.saved_tensors
    if ctx.layout == MASK:
        tokens, cells = map.shape
        return Routes(map, MASK, tokens, cells // 2, pad_offsets), tuple(tensors)
    columns, tokens = map.shape
    return Routes(map.view(-1), INDEX, tokens, columns), tuple(tensors)


class _Permute(Function):
    @staticmethod
    def forward(ctx, x, routes, rows, every_row):
        _save_routes(ctx, routes)
        return _sent(x, routes, rows, None, every_row)[0]

    @staticmethod
    @once_differentiable("moe_permute")
    def backward(ctx, dy):
        routes, _ = _load_routes(ctx)
        return collect(_plain("moe_permute", dy), routes)[0], None, None, None


class _PermuteWithProbs(Function):
    @staticmethod
    def forward(ctx, x, probs, routes, rows, every_row):
        _save_routes(ctx, routes)
        return _sent(x, routes, rows, probs, every_row)

    @staticmethod
    @once_differentiable("moe_permute_with_probs")
    def backward(ctx, dy, row_gradient):
        routes, _ = _load_routes(ctx)
        dx, dprobs = collect(_plain("moe_permute_with_probs", dy), routes, None, row_gradient)
        return dx, dprobs, None, None, None


class _Unpermute(Function):
    @staticmethod
    def forward(ctx, y, routes):
        _save_routes(ctx, routes)
        ctx.rows = y.shape[0]
        return collect(y, routes)[0]

    @staticmethod
    @once_differentiable("moe_unpermute")
    def backward(ctx, dx):
        routes, _ = _load_routes(ctx)
        return _sent(dx, routes, ctx.rows, None, False)[0], None


class _Merge(Function):
    @staticmethod
    def forward(ctx, y, probs, routes):
        # Only the probability gradient reads y.
        _save_routes(ctx, routes, probs, y if ctx.needs_input_grad[1] else None)
        ctx.rows = y.shape[0]
        return collect(y, routes, probs)[0]

    @staticmethod
    @once_differentiable("moe_unpermute")
    def backward(ctx, dx):
        routes, (probs, y) = _load_routes(ctx)
        dy, dprobs = send_weighted(_plain("moe_unpermute", dx), routes, ctx.rows, probs, y)
        return dy, dprobs, None


def pad_rows(x: Tensor, rows: Sequence[int], padded: Sequence[int]) -> Tensor:
    """Pad to [sum of padded, K]: group i has padded[i] rows, its own and then zeros."""
    return permute(x, _routes(x, rows, padded), sum(padded))[0]


def unpad_rows(x: Tensor, rows: Sequence[int], padded: Sequence[int]) -> Tensor:
    """Return the first rows[i] rows in each group of x [sum of padded, K]; the other rows have gradient zero."""
    return unpermute(x, _routes(x, rows, padded))


def _routes(x: Tensor, rows: Sequence[int], padded: Sequence[int]) -> Routes:
    tokens = sum(rows)
    # First row, rows and first padded row per group.
    firsts, padded_firsts = ([0, *accumulate(sizes)][:-1] for sizes in (rows, padded))
    numbers = (*firsts, *rows, *padded_firsts)
    if torch.compiler.is_compiling():
        segments = torch.tensor(numbers, dtype=torch.int32, device=x.device)
    else:
        segments = cached_on_device(numbers, torch.int32, x.device)
    return Routes(rows_of_segments(segments.view(3, -1), tokens), INDEX, tokens, 1)
