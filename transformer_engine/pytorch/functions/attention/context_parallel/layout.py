"""Token order in context parallelism: which tokens in a sequence a rank holds, and order conversions.

A sequence is divided into 2 * size equal chunks. Rank r holds the chunks r and 2 * size - 1 - r, in this order,
which gives every rank the same share of a causal mask. Packed sequences (thd) are divided one by one: a rank's
tensor holds the two chunks of the first sequence, then of the second, and so on. With NO_LOAD_BALANCE, a rank holds
one contiguous packed buffer piece instead. No function reads a tensor on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ....constants import CPLoadBalancingStrategy


def partitioned_indices(cu_seqlens: Tensor, tokens: int, size: int, rank: int) -> Tensor:
    """Return the packed tokens that a rank holds, sequence by sequence, int64 [tokens / size].

    Args:
        cu_seqlens: Cumulative whole sequence lengths [b + 1], each a multiple of 2 * size.
        tokens: Packed tokens on all ranks.
        size: Rank count.
        rank: Rank whose tokens are returned.

    Raises:
        ValueError: The token count is not a multiple of 2 * size, or the rank is outside the group.
    """
    check_rank(size, rank)
    if tokens % (2 * size):
        raise ValueError(
            f"{tokens} tokens are not a multiple of 2 * {size}, the chunks of {size} ranks; pad every sequence to one"
        )
    bounds = cu_seqlens.long()
    sequence, position = places(cu_seqlens // size, tokens // size)
    chunk = (bounds[1:] - bounds[:-1])[sequence] // (2 * size)
    second = position >= chunk
    # The position in the second chunk counts from the first one, hence 2 instead of 1.
    number = torch.where(second, 2 * size - 2 - rank, rank)
    # Tokens behind the last sequence are divided into equal parts.
    tail = (tokens - bounds[-1]) // size
    tail_position = torch.arange(tokens // size, device=bounds.device) - bounds[-1] // size
    return torch.where(
        tail_position < 0,
        bounds[sequence] + number * chunk + position,
        bounds[-1] + rank * tail + tail_position,
    )


def get_thd_partitioned_indices(
    cu_seqlens_padded: Tensor,
    total_tokens: int,
    cp_size: int,
    cp_rank: int,
    device: torch.device | str | None = None,
    load_balancing_strategy: CPLoadBalancingStrategy = CPLoadBalancingStrategy.DUAL_CHUNK_SWAP,
) -> Tensor:
    """Return the packed tokens that a rank holds, int32 [total_tokens / cp_size].

    Args:
        cu_seqlens_padded: Padded sequence bounds [b + 1].
        total_tokens: Packed tokens on all ranks.
        cp_size: Rank count.
        cp_rank: Rank.
        device: Result device, by default as cu_seqlens_padded.
        load_balancing_strategy: Token division.

    Raises:
        AssertionError: load_balancing_strategy is not a CPLoadBalancingStrategy.
        ValueError: The tokens cannot be divided among the ranks, or the rank is outside the group.
    """
    CPLoadBalancingStrategy.check(load_balancing_strategy)
    device = cu_seqlens_padded.device if device is None else device
    if load_balancing_strategy is CPLoadBalancingStrategy.DUAL_CHUNK_SWAP:
        return partitioned_indices(cu_seqlens_padded, total_tokens, cp_size, cp_rank).to(
            device, torch.int32
        )
    check_rank(cp_size, cp_rank)
    piece = tokens_of_piece(total_tokens, cp_size)
    return torch.arange(cp_rank * piece, (cp_rank + 1) * piece, dtype=torch.int32, device=device)


def tokens_of_piece(tokens: int, size: int) -> int:
    """Return the tokens in a contiguous piece; raise ValueError unless the ranks' pieces are equal."""
    if tokens % size:
        raise ValueError(
            f"{tokens} packed tokens are not a multiple of {size} ranks; pad the buffer to {-(-tokens // size) * size}"
        )
    return tokens // size


def restore_thd_gathered_kv(
    x: Tensor,
    cu_seqlens_padded: Tensor,
    cp_size: int,
    load_balancing_strategy: CPLoadBalancingStrategy,
) -> Tensor:
    """Return gathered keys or values x [t, ..], rank 0's tokens first, in sequence order."""
    CPLoadBalancingStrategy.check(load_balancing_strategy)
    if load_balancing_strategy is CPLoadBalancingStrategy.NO_LOAD_BALANCE:
        return x
    return thd_cp_rank_order_to_sequence_order(x, cu_seqlens_padded, cp_size)


def unrestore_thd_gathered_kv(
    x: Tensor,
    cu_seqlens_padded: Tensor,
    cp_size: int,
    load_balancing_strategy: CPLoadBalancingStrategy,
) -> Tensor:
    """Invert `restore_thd_gathered_kv`: x [t, ..] is in sequence order."""
    CPLoadBalancingStrategy.check(load_balancing_strategy)
    if load_balancing_strategy is CPLoadBalancingStrategy.NO_LOAD_BALANCE:
        return x
    return thd_sequence_order_to_cp_rank_order(x, cu_seqlens_padded, cp_size)


def order_of_ranks(cu_seqlens: Tensor, tokens: int, size: int) -> Tensor:
    """Return the packed tokens on rank 0, then on rank 1 and so on, int64 [tokens]."""
    return torch.cat([partitioned_indices(cu_seqlens, tokens, size, rank) for rank in range(size)])


def thd_sequence_order_to_cp_rank_order(
    x: Tensor, cu_seqlens: Tensor, cp_size: int, seq_dim: int = 0
) -> Tensor:
    """Return whole packed sequences x [t, ..] in the order in which ranks hold them, rank 0's tokens first."""
    _check_sequence_axis(seq_dim)
    return x.index_select(0, order_of_ranks(cu_seqlens, x.shape[0], cp_size))


def thd_cp_rank_order_to_sequence_order(
    x: Tensor, cu_seqlens: Tensor, cp_size: int, seq_dim: int = 0
) -> Tensor:
    """Invert `thd_sequence_order_to_cp_rank_order`: x [t, ..] holds the tokens on rank 0, then on rank 1, .."""
    _check_sequence_axis(seq_dim)
    return torch.empty_like(x).index_copy_(0, order_of_ranks(cu_seqlens, x.shape[0], cp_size), x)


def _check_sequence_axis(seq_dim: int) -> None:
    if seq_dim != 0:
        raise ValueError(f"seq_dim={seq_dim}; tokens of packed sequences are axis 0, transpose x")


def get_cu_seqlens_on_cp_rank(
    cu_seqlens: Tensor,
    cu_seqlens_padded_on_cp_rank: Tensor,
    cp_size: int,
    cp_rank: int,
    first_half: bool,
    second_half: bool,
) -> Tensor:
    """Return the cumulative real token counts that a rank holds, its two chunks joined, int32 [b + 1].

    Args:
        cu_seqlens: Cumulative real token counts in whole sequences, which padding follows.
        cu_seqlens_padded_on_cp_rank: Cumulative lengths of a rank's padded sequence parts, two chunks each.
        cp_size: Rank count.
        cp_rank: Rank.
        first_half: Count the tokens in chunk cp_rank.
        second_half: Count the tokens in chunk 2 * cp_size - 1 - cp_rank.
    """
    check_rank(cp_size, cp_rank)
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    chunk = (cu_seqlens_padded_on_cp_rank[1:] - cu_seqlens_padded_on_cp_rank[:-1]) // 2
    chunks = [cp_rank] * first_half + [2 * cp_size - 1 - cp_rank] * second_half
    return torch.nn.functional.pad(count_tokens(lengths, chunk, chunks).cumsum(0), (1, 0)).to(
        torch.int32
    )


def count_tokens(lengths: Tensor, chunk: Tensor | int, chunks: list[int]) -> Tensor:
    """Return how many real tokens per sequence are in some of its chunks, [b], in the length dtype.

    Args:
        lengths: Real tokens per sequence [b].
        chunk: Tokens in one chunk, per sequence [b] or for all.
        chunks: Chunk numbers.
    """
    counts = torch.zeros_like(lengths)
    for number in chunks:
        if isinstance(chunk, Tensor):
            counts = counts + torch.minimum((lengths - number * chunk).clamp(min=0), chunk)
        else:
            counts = counts + (lengths - number * chunk).clamp(min=0, max=chunk)
    return counts


def check_rank(size: int, rank: int) -> None:
    """Raise ValueError unless rank is in a group with size ranks."""
    if not 0 <= rank < size:
        raise ValueError(f"rank={rank} is outside 0..{size - 1}; give a rank of the group")


def places(bounds: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the sequence per token [tokens], and the position in it; sequences have bounds [b + 1]."""
    bounds = bounds.long()
    token = torch.arange(tokens, device=bounds.device)
    sequence = (torch.searchsorted(bounds, token, right=True) - 1).clamp(0, bounds.shape[0] - 2)
    return sequence, token - bounds[sequence]


def half_of_sequences(bounds: Tensor, tokens: int, half: int) -> Tensor:
    """Return the first (0) or second (1) halves of packed sequences as token numbers, int64 [tokens / 2].

    Tokens behind the last sequence are divided too: both halves together are all tokens.
    """
    bounds = bounds.long()
    sequence, position = places(bounds // 2, tokens // 2)
    length = (bounds[1:] - bounds[:-1])[sequence] // 2
    inside = bounds[sequence] + position + half * length
    # The tail halves [bounds[-1], tokens).
    tail = (tokens - bounds[-1]) // 2
    tail_tokens = (
        torch.arange(tokens // 2, device=bounds.device) + bounds[-1] - bounds[-1] // 2 + half * tail
    )
    return torch.where(position < length, inside, tail_tokens)


@dataclass(frozen=True, eq=False)
class TokenOrder:
    """Conversion between the tensors on all ranks, stacked, and one tensor in sequence order.

    Attributes:
        tensor_format: "sbhd", "bshd" or "thd".
        size: Rank count.
        bounds: thd: cumulative lengths [b + 1] of the sequences over all ranks, padding included.
    """

    tensor_format: str
    size: int
    bounds: Tensor | None = None

    def whole(self, parts: Tensor) -> Tensor:
        """Return one tensor with all tokens in sequence order, from the ranks' tensors [size, ..]."""
        if self.tensor_format == "thd":
            assert self.bounds is not None
            return thd_cp_rank_order_to_sequence_order(parts.flatten(0, 1), self.bounds, self.size)
        if self.tensor_format == "bshd":
            parts = parts.transpose(1, 2)
        chunks = parts.unflatten(1, (2, -1)).flatten(0, 1)
        owners = [
            2 * i if i < self.size else 2 * (2 * self.size - 1 - i) + 1
            for i in range(2 * self.size)
        ]
        # A list as an index would be copied to the device, for which the host waits.
        full = torch.cat([chunks[owner] for owner in owners])
        return full.transpose(0, 1) if self.tensor_format == "bshd" else full

    def parts(self, full: Tensor) -> Tensor:
        """Invert `full`: return the ranks' tensors [size, ..], contiguous."""
        if self.tensor_format == "thd":
            assert self.bounds is not None
            ordered = thd_sequence_order_to_cp_rank_order(full, self.bounds, self.size)
            return ordered.unflatten(0, (self.size, -1))
        if self.tensor_format == "bshd":
            full = full.transpose(0, 1)
        order = [i for rank in range(self.size) for i in (rank, 2 * self.size - 1 - rank)]
        chunks = full.chunk(2 * self.size)
        parts = torch.cat([chunks[number] for number in order]).unflatten(0, (self.size, -1))
        return (
            parts.transpose(1, 2).contiguous()
            if self.tensor_format == "bshd"
            else parts.contiguous()
        )
