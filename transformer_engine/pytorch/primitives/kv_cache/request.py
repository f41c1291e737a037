"""What appending to a key-value cache is told, as a backend sees it before it says yes or no."""

from __future__ import annotations

from typing import NamedTuple

import torch


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
