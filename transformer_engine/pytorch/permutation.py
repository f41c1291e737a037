"""Tokens of a mixture of experts: to the experts that take them, back again, and chunk by chunk in another order."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from ..common.checks import one_of, whole
from .functions.permutation import permute, quantized_refusal, unpermute
from .primitives.permutation import INDEX, MASK, Routes, rows_of_chunks, rows_of_indices, rows_of_mask
from .runtime.checks import floating, same_device, tensor, tensor_or_none
from .runtime.device_checks import demand
from .tensor import QuantizedTensor

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


def moe_permute(
    inp: Tensor,
    routing_map: Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: str = MASK,
) -> tuple[Tensor, Tensor]:
    """(y [num_out_tokens, H], row_id_map): tokens [T, H] in the order of the experts that take them.

    routing_map      "mask": [T, E], integers or bool, not 0 where an expert takes a token; rows go by expert, then by
                     token. "index": [T, k], the experts of each token; rows go by expert, then by token and place
    num_out_tokens   rows of y. By mask as many as ones, more are zero; -1 counts them, for which the host waits.
                     By index up to T k, rows beyond are dropped; -1 or 0: none is
    max_token_num    kept for its callers: no memory is held between calls
    No tokens go to no rows, whatever num_out_tokens is.
    Of quantized tokens (FP8, MXFP8, NVFP4, blocks of one row) the row-wise codes and scales are moved.
    """
    one_of("map_type", map_type, _MAPS)
    whole("max_token_num", max_token_num, -1)
    _check(inp, routing_map, num_out_tokens, map_type)
    if inp.numel() == 0:
        return inp.clone(), _no_map(inp)
    if map_type == MASK:
        routes, rows = _by_mask(routing_map, num_out_tokens)
        return permute(inp, routes, rows)[0], routes.map
    tokens, places = routing_map.shape
    if routing_map.dtype != torch.int32:
        warnings.warn(f"routing_map is {routing_map.dtype}; by index it is int32, converted", stacklevel=2)
        routing_map = routing_map.int()
    rows = min(num_out_tokens, tokens * places) if num_out_tokens > 0 else tokens * places
    demand(_are_experts, (_least(routing_map),))
    row_id_map = rows_of_indices(routing_map, rows)
    return permute(inp, Routes(row_id_map, INDEX, tokens, places), rows, every_row=True)[0], row_id_map


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, permuted_probs [num_out_tokens], row_id_map) by mask: probs [T, E] go with the tokens.

    A row whose probability is exactly 0 is a row of zeros, for experts that get rows to fill them up. Its gradient
    goes to its token as that of any row does: a token is not asked what its rows weigh. Other parameters as in
    moe_permute.
    """
    _check(inp, routing_map, num_out_tokens, MASK)
    _check_probs("probs", probs, inp, routing_map.shape)
    if inp.numel() == 0:
        return inp.clone(), probs.reshape(-1)[:0], _no_map(inp)
    routes, rows = _by_mask(routing_map, num_out_tokens)
    y, permuted_probs = permute(inp, routes, rows, probs)
    assert permuted_probs is not None
    return y, permuted_probs, routes.map


def moe_permute_and_pad_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, tokens_per_expert: Tensor, align_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """(y, permuted_probs, row_id_map, pad_offsets, target_tokens_per_expert): each expert's rows are aligned.

    tokens_per_expert   [E], the ones of each column of routing_map; the host waits for those on a GPU
    align_size          an expert's rows are padded by zeros to a multiple of it
    pad_offsets         int64 [E], what moe_unpermute adds to an expert's rows; None where nothing is padded
    target_tokens_per_expert   int64 [E], rows of each expert with their padding
    """
    if tokens_per_expert is None:
        raise ValueError("tokens_per_expert is None; give the number of tokens of each expert, [E]")
    tensor("tokens_per_expert", tokens_per_expert)
    whole("align_size", align_size)
    _check(inp, routing_map, -1, MASK)
    _check_probs("probs", probs, inp, routing_map.shape)
    tokens, experts = routing_map.shape
    if tuple(tokens_per_expert.shape) != (experts,) or tokens_per_expert.is_floating_point():
        raise ValueError(
            f"tokens_per_expert is {tokens_per_expert.dtype} {list(tokens_per_expert.shape)}; give whole numbers "
            f"[{experts}], one an expert"
        )
    counts = tokens_per_expert.to(inp.device, torch.int64)
    target = (counts + (align_size - 1)).div(align_size, rounding_mode="floor") * align_size
    if inp.numel() == 0:
        return inp.clone(), probs.reshape(-1)[:0], _no_map(inp), None, target
    pads = target - counts
    routed, rows = torch.stack((counts.sum(), target.sum())).tolist()
    pad_offsets = None if routed == rows else pads.cumsum(0) - pads
    row_id_map = rows_of_mask(routing_map)
    demand(_are_counts, (tokens_per_expert, (routing_map != 0).sum(0) if inp.is_cpu else None))
    routes = Routes(row_id_map, MASK, tokens, experts, pad_offsets)
    y, permuted_probs = permute(inp, routes, rows, probs)
    assert permuted_probs is not None
    return y, permuted_probs, row_id_map, pad_offsets, target


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | tuple[int, ...] | None = None,
    map_type: str = MASK,
    probs: Tensor | None = None,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    """x [T, H] = sum over a token's rows of merging_probs * inp[row], in float32, in inp's dtype.

    row_id_map      as moe_permute made it, by the same map_type
    merging_probs   by mask [T, E], by index float32 [T, k]; None: the rows are added up
    restore_shape   (T, H), which row_id_map says too but by index without merging_probs: there it tells k, and None
                    means k = 1
    probs           merging_probs by its former name
    pad_offsets     as moe_permute_and_pad_with_probs made them
    """
    if probs is not None:
        if merging_probs is not None:
            raise ValueError("probs is merging_probs by its former name; give one of them")
        warnings.warn("probs is called merging_probs now; use that name", UserWarning, stacklevel=2)
        merging_probs = probs
    one_of("map_type", map_type, _MAPS)
    _check_rows(inp, row_id_map, pad_offsets)
    if row_id_map.numel() == 0:
        return inp.clone()
    tensor_or_none("merging_probs", merging_probs)
    if map_type == INDEX and merging_probs is not None and merging_probs.dtype != torch.float32:
        warnings.warn(
            f"merging_probs is {merging_probs.dtype}; by index it is float32, converted", stacklevel=2
        )
        merging_probs = merging_probs.float()
    places = _places(row_id_map, merging_probs, restore_shape) if map_type == INDEX else 0
    routes = _routes_of(row_id_map, map_type, places, pad_offsets)
    if merging_probs is not None:
        _check_probs("merging_probs", merging_probs, inp, torch.Size((routes.tokens, routes.columns)))
    if restore_shape is not None and tuple(restore_shape) != (routes.tokens, inp.shape[1]):
        raise ValueError(
            f"restore_shape={tuple(restore_shape)} is not that of the tokens, {(routes.tokens, inp.shape[1])}, "
            "by row_id_map; give that, or None"
        )
    demand(_are_there, (_last_row(routes),), inp.shape[0])
    return unpermute(inp, routes, merging_probs)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """y [T, H]: chunk i of y is chunk sorted_index[i] of inp, whose chunks have split_sizes rows.

    Both are integers [chunks] on inp's device, and stay there. Rows in no chunk keep their places.
    """
    _check_chunks(inp, split_sizes, sorted_index)
    if inp.numel() == 0:
        return inp.clone()
    return permute(inp, _by_chunks(inp, split_sizes, sorted_index), inp.shape[0], every_row=True)[0]


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """(y, permuted_probs [T]): probs [T] go with the rows, as moe_sort_chunks_by_index orders them."""
    _check_chunks(inp, split_sizes, sorted_index)
    _check_probs("probs", probs, inp, inp.shape[:1])
    if inp.numel() == 0:
        return inp.clone(), probs.clone()
    routes = _by_chunks(inp, split_sizes, sorted_index)
    y = permute(inp, routes, inp.shape[0], every_row=True)[0]
    moved = permute(probs[:, None], routes, inp.shape[0], every_row=True)[0]
    return y, moved[:, 0]


def _by_mask(routing_map: Tensor, num_out_tokens: int) -> tuple[Routes, int]:
    """The routes of a mask, and the rows that they lead to."""
    tokens, experts = routing_map.shape
    routes = Routes(rows_of_mask(routing_map), MASK, tokens, experts)
    numbers = routes.map[:, 2 * experts]
    if num_out_tokens >= 0:
        demand(_have_rows, (numbers,), num_out_tokens)
        return routes, num_out_tokens
    if torch.compiler.is_compiling() or (routing_map.is_cuda and torch.cuda.is_current_stream_capturing()):
        raise ValueError("num_out_tokens=-1 would have to be counted on the host; give the number of ones")
    return routes, int(numbers.sum())


def _by_chunks(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Routes:
    demand(_are_chunks, (split_sizes, sorted_index), inp.shape[0])
    return Routes(rows_of_chunks(split_sizes, sorted_index, inp.shape[0]), INDEX, inp.shape[0], 1)


def _places(row_id_map: Tensor, probs: Tensor | None, restore_shape: tuple[int, ...] | None) -> int:
    """k of a map by index [T k]: of what tells it, 1 where nothing does."""
    if probs is not None:
        return probs.shape[-1]
    if restore_shape is None or not restore_shape[0]:
        return 1
    return max(1, row_id_map.shape[0] // restore_shape[0])


def _routes_of(row_id_map: Tensor, map_type: str, places: int, pad_offsets: Tensor | None) -> Routes:
    """places: k of a map by index."""
    if map_type == MASK:
        tokens, cells = row_id_map.shape if row_id_map.dim() == 2 else (0, 0)
        if cells % 2 == 0:
            raise ValueError(
                f"row_id_map is {list(row_id_map.shape)}; by mask it is [T, 2 E + 1], as moe_permute made it"
            )
        experts = cells // 2
        if pad_offsets is not None and tuple(pad_offsets.shape) != (experts,):
            raise ValueError(f"pad_offsets is {list(pad_offsets.shape)}; give [{experts}], one an expert")
        return Routes(row_id_map.contiguous(), MASK, tokens, experts, pad_offsets)
    if pad_offsets is not None:
        raise ValueError("pad_offsets belong to map_type='mask'; leave them None by index")
    if row_id_map.dim() != 1 or row_id_map.shape[0] % max(places, 1):
        raise ValueError(
            f"row_id_map is {list(row_id_map.shape)} for {places} experts a token; by index it is [T k], as "
            "moe_permute made it"
        )
    return Routes(row_id_map.contiguous(), INDEX, row_id_map.shape[0] // places, places)


def _no_map(inp: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=inp.device)


def _have_rows(numbers: list[int], rows: int) -> None:
    if sum(numbers) > rows:
        raise ValueError(
            f"num_out_tokens={rows} < {sum(numbers)}, the ones of routing_map; give at least as many, or -1"
        )


def _least(indices: Tensor) -> Tensor | None:
    """The lowest index, where asking for it makes no device wait."""
    return indices.min() if indices.is_cpu and indices.numel() else None


def _last_row(routes: Routes) -> Tensor | None:
    """The last row that the routes read, where asking for it makes no device wait."""
    if not routes.map.is_cpu or not routes.columns:
        return None
    if routes.layout == INDEX:
        return routes.map.max()
    rows, experts, number = routes.map.split((routes.columns, routes.columns, 1), dim=1)
    if routes.pad_offsets is not None:
        rows = rows + routes.pad_offsets[experts.clamp(min=0).long()]
    return torch.where(torch.arange(routes.columns, device=number.device) < number, rows, -1).max()


def _are_experts(least: int | None) -> None:
    if least is not None and least < 0:
        raise ValueError(f"routing_map holds expert {least}; by index give experts 0, 1, ... of each token")


def _are_there(last: int | None, rows: int) -> None:
    if last is not None and last >= rows:
        raise ValueError(
            f"row_id_map leads to row {last} of inp, which has {rows}; give all rows that moe_permute made, in "
            "their order"
        )


def _are_counts(given: list[int], counted: list[int] | None) -> None:
    if counted is not None and given != counted:
        raise ValueError(
            f"tokens_per_expert={given} are not the ones of routing_map, {counted}; give its sum over tokens"
        )


def _are_chunks(splits: list[int], order: list[int], rows: int) -> None:
    if min(splits, default=0) < 0 or sum(splits) > rows:
        raise ValueError(f"split_sizes={splits} must be numbers >= 0 that add up to at most the {rows} rows")
    if sorted(order) != list(range(len(splits))):
        raise ValueError(
            f"sorted_index={order} is no order of {len(splits)} chunks; give each of 0..{len(splits) - 1} once"
        )


def _check(inp: Tensor, routing_map: Tensor, num_out_tokens: int, map_type: str) -> None:
    _check_tokens(inp)
    tensor("routing_map", routing_map)
    if routing_map.dtype not in _COUNTED:
        raise TypeError(
            f"routing_map is {routing_map.dtype}; give int32 or bool, for example routing_map.int()"
        )
    if routing_map.dim() != 2 or routing_map.shape[0] != inp.shape[0]:
        second = "experts" if map_type == MASK else "experts a token"
        raise ValueError(
            f"routing_map is {list(routing_map.shape)} for {inp.shape[0]} tokens; give [{inp.shape[0]}, {second}]"
        )
    same_device("routing_map", routing_map, "inp", inp.device)
    whole("num_out_tokens", num_out_tokens, -1)


def _check_tokens(inp: Tensor) -> None:
    floating("inp", inp)
    if inp.dim() != 2:
        raise ValueError(f"inp is {list(inp.shape)}; give tokens [T, H], for example inp.flatten(0, -2)")
    reason = quantized_refusal(inp)
    if reason is not None:
        raise ValueError(f"inp is a {type(inp).__name__}: {reason}")


def _check_probs(name: str, probs: Tensor, inp: Tensor, shape: torch.Size) -> None:
    floating(name, probs)
    if probs.shape != shape:
        raise ValueError(f"{name} is {list(probs.shape)}; give {list(shape)}")
    same_device(name, probs, "inp", inp.device)


def _check_rows(inp: Tensor, row_id_map: Tensor, pad_offsets: Tensor | None) -> None:
    floating("inp", inp)
    if isinstance(inp, QuantizedTensor):
        raise TypeError(f"inp is a {type(inp).__name__}, whose rows cannot be added up; dequantize() it")
    if inp.dim() != 2:
        raise ValueError(f"inp is {list(inp.shape)}; give permuted tokens [rows, H]")
    tensor("row_id_map", row_id_map)
    if row_id_map.numel() and row_id_map.dtype != torch.int32:
        raise TypeError(f"row_id_map is {row_id_map.dtype}; give the int32 map that moe_permute made")
    same_device("row_id_map", row_id_map, "inp", inp.device)
    tensor_or_none("pad_offsets", pad_offsets)
    if pad_offsets is not None:
        same_device("pad_offsets", pad_offsets, "inp", inp.device)


def _check_chunks(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> None:
    _check_tokens(inp)
    for name, value in (("split_sizes", split_sizes), ("sorted_index", sorted_index)):
        tensor(name, value)
        if value.dtype not in (torch.int32, torch.int64) or value.dim() != 1:
            raise TypeError(f"{name} is {value.dtype} {list(value.shape)}; give int32 or int64 [chunks]")
        same_device(name, value, "inp", inp.device)
    if split_sizes.shape != sorted_index.shape:
        raise ValueError(
            f"split_sizes is {list(split_sizes.shape)}, sorted_index {list(sorted_index.shape)}; give one each a chunk"
        )
