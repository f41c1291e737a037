"""Which tokens of packed sequences the ranks of a context-parallel group hold; nothing is read on the host.

Of the 2 * size equal chunks of a sequence a rank holds the two numbered rank and 2 * size - 1 - rank, which gives
every rank as much of a causal mask. cu_seqlens int32 [b + 1] bounds the sequences, whose lengths are multiples of
2 * size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def partitioned_indices(cu_seqlens: Tensor, tokens: int, size: int, rank: int) -> Tensor:
    """int64 [tokens / size]: the tokens of a rank, sequence by sequence; tokens: those of all ranks."""
    check_rank(size, rank)
    if tokens % (2 * size):
        raise ValueError(
            f"{tokens} tokens are not a multiple of 2 * {size}, the chunks of {size} ranks; pad every sequence to one"
        )
    bounds = cu_seqlens.long()
    sequence, place = places(cu_seqlens // size, tokens // size)
    chunk = (bounds[1:] - bounds[:-1])[sequence] // (2 * size)
    second = place >= chunk
    # A second chunk's place counts from one chunk on, hence 2 less in place of 1.
    number = torch.where(second, 2 * size - 2 - rank, rank)
    return bounds[sequence] + number * chunk + place


def order_of_ranks(cu_seqlens: Tensor, tokens: int, size: int) -> Tensor:
    """int64 [tokens]: the tokens of rank 0, those of rank 1 and so on, as places in the whole sequences."""
    return torch.cat([partitioned_indices(cu_seqlens, tokens, size, rank) for rank in range(size)])


def thd_sequence_order_to_cp_rank_order(
    x: Tensor, cu_seqlens: Tensor, cp_size: int, seq_dim: int = 0
) -> Tensor:
    """[t, ..]: whole packed sequences x [t, ..] in the order in which ranks hold them, rank 0's tokens first."""
    _check_sequence_axis(seq_dim)
    return x.index_select(0, order_of_ranks(cu_seqlens, x.shape[0], cp_size))


def thd_cp_rank_order_to_sequence_order(
    x: Tensor, cu_seqlens: Tensor, cp_size: int, seq_dim: int = 0
) -> Tensor:
    """[t, ..]: the inverse, for the parts of all ranks one behind the other, as a gathering leaves them."""
    _check_sequence_axis(seq_dim)
    return torch.empty_like(x).index_copy_(0, order_of_ranks(cu_seqlens, x.shape[0], cp_size), x)


def _check_sequence_axis(seq_dim: int) -> None:
    if seq_dim != 0:
        raise ValueError(f"seq_dim={seq_dim}; tokens of packed sequences lie along axis 0, transpose x")


def get_cu_seqlens_on_cp_rank(
    cu_seqlens: Tensor,
    cu_seqlens_padded_on_cp_rank: Tensor,
    cp_size: int,
    cp_rank: int,
    first_half: bool,
    second_half: bool,
) -> Tensor:
    """int32 [b + 1]: bounds of the real tokens that a rank holds, when its two chunks of a sequence are joined.

    cu_seqlens                    bounds of the real tokens of whole sequences, which fill their padded extents' fronts
    cu_seqlens_padded_on_cp_rank  bounds of a rank's part of the padded sequences, two chunks each
    first_half, second_half       count the tokens of the chunk rank, of the chunk 2 * cp_size - 1 - rank
    """
    check_rank(cp_size, cp_rank)
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    chunk = (cu_seqlens_padded_on_cp_rank[1:] - cu_seqlens_padded_on_cp_rank[:-1]) // 2
    held = torch.zeros_like(lengths)
    for number, counted in ((cp_rank, first_half), (2 * cp_size - 1 - cp_rank, second_half)):
        if counted:
            held = held + torch.minimum((lengths - number * chunk).clamp(min=0), chunk)
    return torch.nn.functional.pad(held.cumsum(0), (1, 0)).to(torch.int32)


def check_rank(size: int, rank: int) -> None:
    """ValueError unless rank is one of size ranks."""
    if not 0 <= rank < size:
        raise ValueError(f"rank={rank} is outside 0..{size - 1}; give a rank of the group")


def places(bounds: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The sequence of each of the tokens [tokens], and its place in it; sequences lie between bounds [b + 1]."""
    bounds = bounds.long()
    token = torch.arange(tokens, device=bounds.device)
    sequence = (torch.searchsorted(bounds, token, right=True) - 1).clamp(0, bounds.shape[0] - 2)
    return sequence, token - bounds[sequence]
