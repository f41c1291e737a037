"""Appending to a key-value cache in torch operations, on any device and without reading one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ....common.dispatch import Backend


class CacheRequest(NamedTuple):
    """new, cache: dtypes of the new tokens and of the cache.

    caches   shapes of keys and values
    strides  of the new keys and values, whose features are next to each other
    table    (pages a sequence, elements between two) of the page table
    batch    sequences; longest: no sequence brings more new tokens; empty: there is none
    """

    new: torch.dtype
    cache: torch.dtype
    device: torch.device
    caches: tuple[torch.Size, torch.Size] = (torch.Size(), torch.Size())
    strides: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    table: tuple[int, int] | None = None
    tensor_format: str = "thd"
    batch: int = 0
    longest: int = 0
    empty: bool = True


def bind(request: CacheRequest) -> Callable[..., None]:
    """(new_k, new_v, k_cache, v_cache, page_table, cu_new, cu_cached) -> None"""
    return functools.partial(append, tensor_format=request.tensor_format)


def append(
    new_k: Tensor,
    new_v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor | None,
    cu_new: Tensor,
    cu_cached: Tensor,
    tensor_format: str,
) -> None:
    """cache[slot of token i of sequence b] = new token, for the real tokens."""
    if new_k.numel() + new_v.numel() == 0 or cu_new.shape[0] < 2:
        return
    sequence, place, real = _tokens(new_k, cu_new, tensor_format)
    new, cached = cu_new[1:] - cu_new[:-1], cu_cached[1:] - cu_cached[:-1]
    position = (cached - new)[sequence].long() + place
    extent = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    real = real & (position >= 0) & (position < extent)
    slot = _slots(sequence, position.clamp(0, extent - 1), k_cache.shape[1], page_table)
    slots = k_cache.shape[0] * k_cache.shape[1]
    real, slot = real & (slot >= 0) & (slot < slots), slot.clamp(0, slots - 1)
    # What is not to be written repeats the write of one real token; without any, it rewrites what is there.
    # Shaped [1]: an index without axes would be read on the host.
    first = real.to(torch.int8).argmax(dim=0, keepdim=True)
    slot = torch.where(real, slot, slot[first])
    for cache, tokens in ((k_cache, new_k), (v_cache, new_v)):
        flat = cache.view(-1, *cache.shape[2:])
        tokens = _flat(tokens.detach(), tensor_format).to(cache.dtype)
        tokens = torch.where(real[:, None, None], tokens, tokens[first])
        flat.index_put_((slot,), torch.where(real.any(), tokens, flat[slot]))


def _tokens(new: Tensor, cu_new: Tensor, tensor_format: str) -> tuple[Tensor, Tensor, Tensor]:
    """Of every token: its sequence, its place among the sequence's new tokens, whether it belongs to one."""
    if tensor_format == "thd":
        token = torch.arange(new.shape[0], device=new.device)
        bounds = cu_new.long()
        sequence = (torch.searchsorted(bounds, token, right=True) - 1).clamp(0, bounds.shape[0] - 2)
        return sequence, token - bounds[sequence], token < bounds[-1]
    size, batch = (new.shape[0], new.shape[1]) if tensor_format == "sbhd" else (new.shape[1], new.shape[0])
    place = torch.arange(size, device=new.device).repeat(batch)
    sequence = torch.arange(batch, device=new.device).repeat_interleave(size)
    return sequence, place, place < (cu_new[1:] - cu_new[:-1])[sequence]


def _flat(new: Tensor, tensor_format: str) -> Tensor:
    """[tokens, h, d], sequence by sequence."""
    if tensor_format == "thd":
        return new
    return (new.transpose(0, 1) if tensor_format == "sbhd" else new).flatten(0, 1)


def _slots(sequence: Tensor, position: Tensor, size: int, page_table: Tensor | None) -> Tensor:
    if page_table is None:
        return sequence * size + position
    return page_table[sequence, position // size].long() * size + position % size


BACKEND: Backend[CacheRequest] = Backend("reference", bind=bind)
