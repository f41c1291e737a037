"""The request for an append to a key-value cache, and the reference in torch operations without reads on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ....common.dispatch import Backend


class CacheRequest(NamedTuple):
    """One append to a cache.

    Attributes:
        new: Dtype of the new tokens.
        cache: Cache dtype.
        caches: Key and value cache shapes.
        strides: Strides of the new keys and values, which have contiguous features.
        table: (pages per sequence, row stride) of the page table.
        batch: Sequence count.
        longest: Upper bound of new tokens per sequence.
        empty: Whether there are no new tokens.
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
    """Return the operation (new_k, new_v, k_cache, v_cache, page_table, cu_new, cu_cached) -> None."""
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
    """Write each real token: cache[slot of token i of sequence b] = new token."""
    if new_k.numel() + new_v.numel() == 0 or cu_new.shape[0] < 2:
        return
    sequence, index, real = _tokens(new_k, cu_new, tensor_format)
    new, cached = cu_new[1:] - cu_new[:-1], cu_cached[1:] - cu_cached[:-1]
    position = (cached - new)[sequence].long() + index
    extent = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    real = real & (position >= 0) & (position < extent)
    position, size = position.clamp(0, extent - 1), k_cache.shape[1]
    if page_table is None:
        slot = sequence * size + position
    else:
        slot = page_table[sequence, position // size].long() * size + position % size
    slots = k_cache.shape[0] * size
    real, slot = real & (slot >= 0) & (slot < slots), slot.clamp(0, slots - 1)
    # A skipped token repeats the write of one real token; without any real token, it rewrites the
    # stored values. Shape [1]: an index without axes would be read on the host.
    first = real.to(torch.int8).argmax(dim=0, keepdim=True)
    slot = torch.where(real, slot, slot[first])
    for cache, tokens in ((k_cache, new_k), (v_cache, new_v)):
        flat = cache.view(-1, *cache.shape[2:])
        tokens = tokens.detach()
        if tensor_format != "thd":  # make it [tokens, h, d], sequence by sequence
            tokens = (tokens.transpose(0, 1) if tensor_format == "sbhd" else tokens).flatten(0, 1)
        tokens = tokens.to(cache.dtype)
        tokens = torch.where(real[:, None, None], tokens, tokens[first])
        flat.index_put_((slot,), torch.where(real.any(), tokens, flat[slot]))


def _tokens(new: Tensor, cu_new: Tensor, tensor_format: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return for every token: its sequence, its index among the sequence's new tokens, whether it is in a sequence."""
    if tensor_format == "thd":
        token = torch.arange(new.shape[0], device=new.device)
        bounds = cu_new.long()
        sequence = (torch.searchsorted(bounds, token, right=True) - 1).clamp(0, bounds.shape[0] - 2)
        return sequence, token - bounds[sequence], token < bounds[-1]
    size, batch = (
        (new.shape[0], new.shape[1]) if tensor_format == "sbhd" else (new.shape[1], new.shape[0])
    )
    index = torch.arange(size, device=new.device).repeat(batch)
    sequence = torch.arange(batch, device=new.device).repeat_interleave(size)
    return sequence, index, index < (cu_new[1:] - cu_new[:-1])[sequence]


BACKEND: Backend[CacheRequest] = Backend("reference", bind=bind)
