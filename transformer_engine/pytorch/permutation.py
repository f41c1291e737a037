"""Token permutation in a mixture of experts: to the rows of their experts, back, and chunk by chunk."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..common.checks import check_option, described, suggests_keywords
from ..common.numbers import to_int
from .functions.permutation import permute, unpermute
from .functions.permutation_checks import (
    check_chunks,
    check_counts,
    check_experts,
    check_last_row,
    check_permuted,
    check_probs,
    check_row_count,
    check_rows,
    read_chunks,
)
from .primitives.permutation import (
    INDEX,
    MASK,
    Routes,
    rows_of_chunks,
    rows_of_indices,
    rows_of_mask,
)
from .runtime.autograd import check_transforms
from .runtime.checks import tensor, tensor_or_none
from .runtime.device_checks import demand
from .runtime.warn_once import warn_once

__all__ = [
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
]

_MAPS = (MASK, INDEX)
_COUNTED = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@suggests_keywords
def moe_permute(
    inp: Tensor,
    routing_map: Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: str = MASK,
) -> tuple[Tensor, Tensor]:
    """Permute tokens [T, H] into the order of the experts that they are routed to.

    Args:
        inp: Tokens with any dtype. For quantized tokens (FP8, MXFP8, NVFP4, one-row blocks) the
            row-wise codes and scales are moved.
        routing_map: With "mask": [T, E], nonzero where a token is routed to an expert; rows are
            ordered by expert, then by token. With "index": [T, k], the experts of each token, -1
            for a dropped route; rows are ordered by expert, then by token and column.
        num_out_tokens: Result rows. With "mask" at least the route count, further rows are zero; -1 counts
            the routes, which synchronizes with the device. With "index" at most T k, later rows are dropped;
            -1 or 0 drops none. Rows without a route are zero. Without tokens the result has no rows.
        max_token_num: Accepted and ignored: no memory is kept between calls.
        map_type: "mask" or "index".

    Returns:
        `(y [num_out_tokens, H], row_id_map)`.
    """
    check_option("map_type", map_type, _MAPS)
    rows = to_int("num_out_tokens", num_out_tokens, -1)
    check_permuted(inp, routing_map, map_type)
    if inp.numel() == 0:
        return inp.clone(), _no_map(inp)
    if map_type == MASK:
        routes, rows = _mask_routes(routing_map, rows)
        return permute(inp, routes, rows)[0], routes.map
    tokens, places = routing_map.shape
    if routing_map.dtype != torch.int32:
        warnings.warn(
            f"routing_map is {routing_map.dtype}; by index it is int32, converted", stacklevel=2
        )
        routing_map = routing_map.int()
    rows = min(rows, tokens * places) if rows > 0 else tokens * places
    # The lowest index, if reading it does not wait for a device.
    least = routing_map.min() if routing_map.is_cpu and routing_map.numel() else None
    demand(check_experts, (least,))
    row_id_map = rows_of_indices(routing_map, rows)
    return permute(inp, Routes(row_id_map, INDEX, tokens, places), rows)[0], row_id_map


@suggests_keywords
def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """Permute tokens and their probabilities [T, E] by a mask; the other arguments are as in `moe_permute`.

    A row whose probability is exactly 0 is a zero row, so that routes can fill up an expert's rows.
    Its gradient reaches its token like the gradient of any other row.

    Args:
        probs: Probabilities [T, E].

    Returns:
        `(y [num_out_tokens, H], permuted_probs [num_out_tokens], row_id_map)`.
    """
    rows = to_int("num_out_tokens", num_out_tokens, -1)
    check_permuted(inp, routing_map, MASK)
    check_probs("probs", probs, inp, routing_map.shape)
    if inp.numel() == 0:
        return inp.clone(), probs.reshape(-1)[:0], _no_map(inp)
    routes, rows = _mask_routes(routing_map, rows)
    y, permuted_probs = permute(inp, routes, rows, probs)
    assert permuted_probs is not None
    return y, permuted_probs, routes.map


@suggests_keywords
def moe_permute_and_pad_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, tokens_per_expert: Tensor, align_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Permute tokens and probabilities by a mask, and pad the rows of each expert with zeros.

    The other arguments are as in `moe_permute_with_probs`.

    Args:
        tokens_per_expert: [E], `routing_map` summed over the tokens, whole numbers in any dtype. On
            a GPU it is read by the host.
        align_size: The rows of each expert are padded to a multiple of this.

    Returns:
        `(y, permuted_probs, row_id_map, pad_offsets, target_tokens_per_expert)`: `pad_offsets`,
        int64 [E], is added to an expert's rows by `moe_unpermute`, and None without padding;
        `target_tokens_per_expert`, int64 [E], are the rows of each expert with their padding.
    """
    if tokens_per_expert is None:
        raise ValueError("tokens_per_expert is None; give the number of tokens of each expert, [E]")
    tensor("tokens_per_expert", tokens_per_expert)
    align_size = to_int("align_size", align_size, 1)
    check_permuted(inp, routing_map, MASK)
    check_probs("probs", probs, inp, routing_map.shape)
    tokens, experts = routing_map.shape
    if tuple(tokens_per_expert.shape) != (experts,):
        raise ValueError(
            f"tokens_per_expert is {tokens_per_expert.dtype} {list(tokens_per_expert.shape)}; give whole numbers "
            f"[{experts}], one an expert"
        )
    counts = tokens_per_expert.to(inp.device, torch.int64)
    if tokens_per_expert.is_floating_point() and bool(
        (tokens_per_expert.to(inp.device) != counts).any()
    ):
        raise ValueError(
            f"tokens_per_expert={tokens_per_expert.tolist()} holds fractions; give whole numbers"
        )
    target = (counts + (align_size - 1)).div(align_size, rounding_mode="floor") * align_size
    if inp.numel() == 0:
        return inp.clone(), probs.reshape(-1)[:0], _no_map(inp), None, target
    pads = target - counts
    routed, rows = torch.stack((counts.sum(), target.sum())).tolist()
    pad_offsets = None if routed == rows else pads.cumsum(0) - pads
    mask = _countable_mask(routing_map)
    row_id_map = rows_of_mask(mask)
    demand(check_counts, (tokens_per_expert, (mask != 0).sum(0) if inp.is_cpu else None))
    routes = Routes(row_id_map, MASK, tokens, experts, pad_offsets)
    y, permuted_probs = permute(inp, routes, rows, probs)
    assert permuted_probs is not None
    return y, permuted_probs, row_id_map, pad_offsets, target


@suggests_keywords
def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | Sequence[int] | None = None,
    map_type: str = MASK,
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    """Compute x [T, H], merging_probs * inp[row] summed over a token's rows, in float32, in the dtype of `inp`.

    Args:
        inp: Permuted tokens [rows, H].
        row_id_map: Returned by `moe_permute` with the same `map_type`.
        merging_probs: With "mask" [T, E], with "index" float32 [T, k]; by default the rows are added up.
        restore_shape: (T, H). Only needed with "index" without `merging_probs`, where it determines k (1 by default).
        map_type: "mask" or "index".
        probs: Former name for `merging_probs`.
        pad_offsets: Returned by `moe_permute_and_pad_with_probs`; has no effect with "index".
    """
    if probs is not None:
        if merging_probs is not None:
            raise ValueError("probs is merging_probs by its former name; give one of them")
        warnings.warn("probs is called merging_probs now; use that name", UserWarning, stacklevel=2)
        merging_probs = probs
    check_option("map_type", map_type, _MAPS)
    check_rows(inp, row_id_map, pad_offsets)
    tensor_or_none("merging_probs", merging_probs)
    shape = None if restore_shape is None else _matrix_shape(restore_shape)
    if row_id_map.numel() == 0:
        # No rows, in the autograd graph of the input and the probabilities.
        if merging_probs is None or not merging_probs.requires_grad:
            return inp.clone()
        return inp + merging_probs.reshape(-1)[:0].sum().to(inp.dtype)
    if merging_probs is not None and merging_probs.dtype != torch.float32:
        # Rows by mask are multiplied by probabilities in any floating-point dtype.
        if map_type == INDEX:
            message = f"merging_probs is {merging_probs.dtype}; by index it is float32, converted"
            warnings.warn(message, stacklevel=2)
        if map_type == INDEX or not merging_probs.is_floating_point():
            merging_probs = merging_probs.float()
    places = _choices_per_token(row_id_map, merging_probs, shape) if map_type == INDEX else 0
    routes = _load_map_routes(row_id_map, map_type, places, pad_offsets)
    if merging_probs is not None:
        check_probs(
            "merging_probs", merging_probs, inp, torch.Size((routes.tokens, routes.columns))
        )
    if shape is not None and shape != (routes.tokens, inp.shape[1]):
        _reject_restored(shape, (routes.tokens, inp.shape[1]), map_type)
    demand(check_last_row, (_last_row(routes),), inp.shape[0])
    return unpermute(inp, routes, merging_probs)


@suggests_keywords
def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """Reorder token chunks [T, H]: chunk i of the result is chunk sorted_index[i] of `inp`.

    Args:
        inp: Tokens [T, H].
        split_sizes: Rows per chunk, integers [chunks]. Rows beyond their sum stay in place.
        sorted_index: Order of the chunks, integers [chunks]; like `split_sizes` on the device of
            `inp` and not read by the host.
    """
    check_transforms("moe_sort_chunks_by_index", inp, split_sizes, sorted_index)
    split_sizes, sorted_index = read_chunks(inp, split_sizes, sorted_index)
    if inp.numel() == 0:
        return inp.clone()
    return permute(
        inp, _chunk_routes(inp, split_sizes, sorted_index), inp.shape[0], every_row=True
    )[0]


@suggests_keywords
def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """Reorder token and probability chunks. The other arguments are as in `moe_sort_chunks_by_index`.

    Args:
        probs: Token probabilities [T] or [T, 1].

    Returns:
        `(y [T, H], permuted_probs [T])`.
    """
    check_transforms("moe_sort_chunks_by_index_with_probs", inp, probs, split_sizes, sorted_index)
    split_sizes, sorted_index = read_chunks(inp, split_sizes, sorted_index)
    tensor("probs", probs)
    if probs.shape == (inp.shape[0], 1):
        probs = probs[:, 0]
    check_probs("probs", probs, inp, inp.shape[:1])
    if inp.numel() == 0:
        return inp.clone(), probs.clone()
    routes = _chunk_routes(inp, split_sizes, sorted_index)
    y = permute(inp, routes, inp.shape[0], every_row=True)[0]
    permuted = permute(probs[:, None], routes, inp.shape[0], every_row=True)[0]
    return y, permuted[:, 0]


def _mask_routes(routing_map: Tensor, num_out_tokens: int) -> tuple[Routes, int]:
    """Return the routes of a mask and the row count, counted for -1."""
    tokens, experts = routing_map.shape
    routes = Routes(rows_of_mask(_countable_mask(routing_map)), MASK, tokens, experts)
    numbers = routes.map[:, 2 * experts]
    if num_out_tokens >= 0:
        demand(check_row_count, (numbers,), num_out_tokens)
        return routes, num_out_tokens
    if torch.compiler.is_compiling() or (
        routing_map.is_cuda and torch.cuda.is_current_stream_capturing()
    ):
        raise ValueError(
            "num_out_tokens=-1 synchronizes with the device, which graph capture and torch.compile rule out; give the "
            "number of routes"
        )
    return routes, int(numbers.sum())


def _countable_mask(routing_map: Tensor) -> Tensor:
    """Return the mask in a dtype that can be counted."""
    return routing_map if routing_map.dtype in _COUNTED else routing_map.int()


def _chunk_routes(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Routes:
    demand(check_chunks, (split_sizes, sorted_index), inp.shape[0])
    return Routes(rows_of_chunks(split_sizes, sorted_index, inp.shape[0]), INDEX, inp.shape[0], 1)


def _matrix_shape(shape: Any) -> tuple[int, int]:
    """Convert `restore_shape` to (T, H)."""
    listed = shape.tolist() if hasattr(shape, "tolist") else shape
    if isinstance(listed, (str, bytes)) or not isinstance(listed, Sequence) or len(listed) != 2:
        raise ValueError(
            f"restore_shape={described(shape)} is not a pair of sizes; give (tokens, H), or None"
        )
    return to_int("restore_shape[0]", listed[0], 0), to_int("restore_shape[1]", listed[1], 0)


def _reject_restored(shape: tuple[int, int], expected: tuple[int, int], map_type: str) -> None:
    """Raise ValueError for another shape than the tokens'; by index, where it has no effect, warn."""
    if map_type == INDEX:
        warn_once(
            "moe_unpermute(restore_shape=) by index",
            f"restore_shape={shape} has no effect with map_type='index': the tokens are {expected} by row_id_map and "
            "merging_probs; leave it out",
        )
        return
    raise ValueError(
        f"restore_shape={shape} is not that of the tokens, {expected}, by row_id_map; give that, or None"
    )


def _choices_per_token(
    row_id_map: Tensor, probs: Tensor | None, shape: tuple[int, int] | None
) -> int:
    """Return k for a map by index [T k], from the probabilities or the shape, else 1."""
    if probs is not None:
        if probs.dim() != 2 or probs.shape[1] == 0:
            raise ValueError(
                f"merging_probs is {list(probs.shape)}; by index give [T, k], with k of at least 1"
            )
        return probs.shape[1]
    if shape is None or not shape[0] or row_id_map.shape[0] % shape[0]:
        return 1
    return max(1, row_id_map.shape[0] // shape[0])


def _load_map_routes(
    row_id_map: Tensor, map_type: str, places: int, pad_offsets: Tensor | None
) -> Routes:
    """Return the routes of a map; `places` is k of a map by index."""
    if map_type == MASK:
        tokens, cells = row_id_map.shape if row_id_map.dim() == 2 else (0, 0)
        if cells % 2 == 0:
            raise ValueError(
                f"row_id_map is {list(row_id_map.shape)}; by mask it is [T, 2 E + 1], as moe_permute made it"
            )
        experts = cells // 2
        if pad_offsets is not None and tuple(pad_offsets.shape) != (experts,):
            raise ValueError(
                f"pad_offsets is {list(pad_offsets.shape)}; give [{experts}], one an expert"
            )
        return Routes(row_id_map.contiguous(), MASK, tokens, experts, pad_offsets)
    if pad_offsets is not None:
        warn_once(
            "moe_unpermute(pad_offsets=) by index",
            "pad_offsets have no effect with map_type='index'; leave them out",
        )
    if row_id_map.dim() != 1 or row_id_map.shape[0] % places:
        raise ValueError(
            f"row_id_map is {list(row_id_map.shape)} for {places} experts a token; by index it is [T k], as "
            "moe_permute made it"
        )
    return Routes(row_id_map.contiguous(), INDEX, row_id_map.shape[0] // places, places)


def _no_map(inp: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=inp.device)


def _last_row(routes: Routes) -> Tensor | None:
    """Return the last row that the routes read if reading it does not wait for a device."""
    if not routes.map.is_cpu or not routes.columns:
        return None
    if routes.layout == INDEX:
        return routes.map.max()
    rows, experts, number = routes.map.split((routes.columns, routes.columns, 1), dim=1)
    if routes.pad_offsets is not None:
        rows = rows + routes.pad_offsets[experts.clamp(min=0).long()]
    return torch.where(torch.arange(routes.columns, device=number.device) < number, rows, -1).max()
