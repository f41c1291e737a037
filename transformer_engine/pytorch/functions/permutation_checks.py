"""Checks for permutation arguments: shapes and devices at once, values in tensors as rules for `demand`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...common.numbers import with_article
from ..primitives.permutation import MASK
from ..runtime.checks import floating, same_device, tensor, tensor_or_none
from ..tensor import QuantizedTensor
from .permutation import unsupported_rows_reason


def check_row_count(numbers: list[int], rows: int) -> None:
    """Raise ValueError unless the rows suffice for the routes of each token."""
    if sum(numbers) > rows:
        raise ValueError(
            f"num_out_tokens={rows} < {sum(numbers)}, the ones of routing_map; give at least as many, or -1"
        )


def check_experts(least: int | None) -> None:
    """Raise ValueError if the lowest expert index is below -1."""
    if least is not None and least < -1:
        raise ValueError(
            f"routing_map holds expert {least}; by index give experts 0, 1, ... of each token, -1 for a dropped route"
        )


def check_last_row(last: int | None, rows: int) -> None:
    """Raise ValueError if the last row of a map does not exist."""
    if last is not None and last >= rows:
        raise ValueError(
            f"row_id_map leads to row {last} of inp, which has {rows}; give all rows that moe_permute made, in "
            "their order"
        )


def check_counts(expected: list[int], counted: list[int] | None) -> None:
    """Raise ValueError unless the tokens per expert match the routing map."""
    if counted is not None and expected != counted:
        raise ValueError(
            f"tokens_per_expert={expected} are not the ones of routing_map, {counted}; give its sum over tokens"
        )


def check_chunks(splits: list[int], order: list[int], rows: int) -> None:
    """Raise ValueError unless the sizes fit the rows and the order holds each chunk once."""
    if min(splits, default=0) < 0 or sum(splits) > rows:
        raise ValueError(
            f"split_sizes={splits} must be numbers >= 0 that add up to at most the {rows} rows"
        )
    if sorted(order) != list(range(len(splits))):
        raise ValueError(
            f"sorted_index={order} is not an order of {len(splits)} chunks; give each of 0..{len(splits) - 1} once"
        )


def check_permuted(inp: Tensor, routing_map: Tensor, map_type: str) -> None:
    """Raise an error unless tokens can be permuted by the map."""
    _check_tokens(inp)
    _dense("routing_map", routing_map)
    if routing_map.dim() != 2 or routing_map.shape[0] != inp.shape[0]:
        second = "experts" if map_type == MASK else "experts a token"
        raise ValueError(
            f"routing_map is {list(routing_map.shape)} for {inp.shape[0]} tokens; give [{inp.shape[0]}, {second}]"
        )
    same_device("routing_map", routing_map, "inp", inp.device)


def _dense(name: str, value: Any) -> None:
    """Raise TypeError unless the value is a tensor with strides, plain or quantized."""
    tensor(name, value)
    if value.layout != torch.strided:
        raise TypeError(
            f"{name} is a {value.layout} tensor; give a dense one, for example {name}.to_dense()"
        )


def _check_tokens(inp: Tensor) -> None:
    _dense("inp", inp)
    if inp.dim() != 2:
        raise ValueError(
            f"inp is {list(inp.shape)}; give tokens [T, H], for example inp.flatten(0, -2)"
        )
    reason = unsupported_rows_reason(inp)
    if reason is not None:
        raise ValueError(f"inp is {with_article(type(inp))}: {reason}")


def check_probs(name: str, probs: Tensor, inp: Tensor, shape: torch.Size) -> None:
    """Raise an error unless the probabilities have the shape and are on the tokens' device."""
    _dense(name, probs)
    if probs.shape != shape:
        raise ValueError(f"{name} is {list(probs.shape)}; give {list(shape)}")
    same_device(name, probs, "inp", inp.device)


def check_rows(inp: Tensor, row_id_map: Tensor, pad_offsets: Tensor | None) -> None:
    """Raise an error unless rows can be collected by the map."""
    floating("inp", inp)
    _dense("inp", inp)
    if isinstance(inp, QuantizedTensor):
        raise TypeError(
            f"inp is {with_article(type(inp))}, whose rows cannot be added up; dequantize() it"
        )
    if inp.dim() != 2:
        raise ValueError(f"inp is {list(inp.shape)}; give permuted tokens [rows, H]")
    _dense("row_id_map", row_id_map)
    if row_id_map.numel() and row_id_map.dtype != torch.int32:
        raise TypeError(
            f"row_id_map is {row_id_map.dtype}; give the int32 map that moe_permute made"
        )
    same_device("row_id_map", row_id_map, "inp", inp.device)
    tensor_or_none("pad_offsets", pad_offsets)
    if pad_offsets is not None:
        same_device("pad_offsets", pad_offsets, "inp", inp.device)


def read_chunks(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> tuple[Tensor, Tensor]:
    """Return chunk sizes and order as int32 or int64; raise an error unless they fit the tokens."""
    _check_tokens(inp)
    found = []
    for name, value in (("split_sizes", split_sizes), ("sorted_index", sorted_index)):
        _dense(name, value)
        if value.dim() != 1:
            raise TypeError(
                f"{name} is {value.dtype} {list(value.shape)}; give int32 or int64 [chunks]"
            )
        same_device(name, value, "inp", inp.device)
        found.append(value if value.dtype in (torch.int32, torch.int64) else value.to(torch.int64))
    if split_sizes.shape != sorted_index.shape:
        raise ValueError(
            f"split_sizes is {list(split_sizes.shape)}, sorted_index {list(sorted_index.shape)}; give one entry per "
            "chunk"
        )
    return found[0], found[1]
