"""Checks for an append to a key-value cache: lengths, pages and shapes."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from ...runtime.device_checks import demand


class CacheExtents(NamedTuple):
    """Sizes of an append and the cache.

    Attributes:
        tokens: New tokens per sequence or, if packed, in all sequences.
        packed: Whether the new tokens are packed (thd).
        longest: Upper bound of a sequence's new tokens.
        capacity: Tokens per sequence.
        page_size: Tokens per page; 0 without pages.
        pages: Page count; 0 without pages.
    """

    tokens: int
    packed: bool
    longest: int
    capacity: int
    page_size: int = 0
    pages: int = 0


def check_append(
    new_k: Tensor,
    k_cache: Tensor,
    page_table: Tensor | None,
    cu_new: Tensor,
    cu_cached: Tensor,
    tensor_format: str,
    longest: int,
    own_table: bool = False,
) -> None:
    """Raise ValueError, before anything is written, for lengths or pages that `append` cannot process.

    The other arguments are as in `append`.

    Args:
        own_table: The page table was filled by a cache manager, so its entries are not checked again.
    """
    packed = tensor_format == "thd"
    batch = cu_new.shape[0] - 1
    for name, x in (("new", cu_new), ("cached", cu_cached)):
        if x.ndim != 1 or x.shape[0] != cu_new.shape[0] or x.shape[0] < 1:
            raise ValueError(
                f"the {name} lengths are {list(x.shape)}; give cumulative ones, [b + 1] of b sequences"
            )
    if not packed:
        sequences = new_k.shape[0 if tensor_format == "bshd" else 1]
        if sequences != batch:
            raise ValueError(
                f"new keys of {sequences} sequences, lengths of {batch}; give one length per sequence"
            )
    rows = k_cache.shape[0] if page_table is None else page_table.shape[0]
    if batch > rows:
        what = "the cache" if page_table is None else "page_table"
        raise ValueError(
            f"{batch} sequences > {rows} rows of {what}; give fewer, or a larger cache"
        )
    tokens = new_k.shape[1 if tensor_format == "bshd" else 0]
    if page_table is None:
        extents = CacheExtents(tokens, packed, longest, k_cache.shape[1])
    else:
        size = k_cache.shape[1]
        extents = CacheExtents(
            tokens, packed, longest, size * page_table.shape[1], size, k_cache.shape[0]
        )
    demand(fits, (cu_new, cu_cached, None if own_table else page_table), extents)


def fits(
    cu_new: list[int], cu_cached: list[int], table: list[list[int]] | None, extents: CacheExtents
) -> None:
    """Raise ValueError unless every new token has a place in the cache; see `check_append`."""
    for name, bounds in (("new", cu_new), ("cached", cu_cached)):
        if bounds[0] != 0 or any(end < begin for begin, end in pairwise(bounds)):
            raise ValueError(
                f"cumulative {name} lengths {bounds} do not begin at 0 and grow; add lengths up"
            )
    if extents.packed and cu_new[-1] > extents.tokens:
        raise ValueError(
            f"{cu_new[-1]} new tokens are announced, the tensor has {extents.tokens}; give all of them"
        )
    most = extents.longest if extents.packed else min(extents.longest, extents.tokens)
    for row in range(len(cu_new) - 1):
        new, total = cu_new[row + 1] - cu_new[row], cu_cached[row + 1] - cu_cached[row]
        if new > most:
            raise ValueError(
                f"sequence {row} brings {new} new tokens > {most}; split the step or raise the limit"
            )
        if total < new:
            raise ValueError(
                f"sequence {row} has {total} cached tokens, fewer than its {new} new ones; cached lengths count the new"
            )
        if total > extents.capacity:
            raise ValueError(
                f"sequence {row} has {total} tokens > {extents.capacity}, its place in the cache; make it larger"
            )
        if table is not None and new:
            for page in table[row][
                (total - new) // extents.page_size : -(-total // extents.page_size)
            ]:
                if not 0 <= page < extents.pages:
                    raise ValueError(
                        f"page_table sends sequence {row} to page {page}, outside of 0..{extents.pages - 1}; correct it"
                    )
