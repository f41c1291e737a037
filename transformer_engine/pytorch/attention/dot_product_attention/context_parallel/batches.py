"""Token ids, labels and positions in packed sequences, padded so that ranks can share them, and a rank's part.

These functions belong into a data loader: they read lengths on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....constants import CPLoadBalancingStrategy
from ....functions.attention.context_parallel.contiguous import piece_of_rank
from ....functions.attention.context_parallel.layout import (
    check_rank,
    get_thd_partitioned_indices,
    tokens_of_piece,
)
from ....primitives.attention.packed import cumulative, sequence_lengths


def pad_thd_sequences_for_cp(
    input_ids: Tensor,
    labels: Tensor,
    cu_seqlens: Tensor,
    divisibility_factor: int,
    padding_token_id: int = 0,
    padding_label_id: int = -100,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pad every packed sequence at its end to a multiple of divisibility_factor.

    Args:
        input_ids: Token ids [t] or [1, t].
        labels: Labels [t] or [1, t].
        cu_seqlens: Sequence bounds [b + 1].
        divisibility_factor: 2 * (number of ranks), so that each rank gets two equal chunks of every sequence.
        padding_token_id: Padding token id.
        padding_label_id: Padding label.

    Returns:
        input_ids [p], labels [p] and cu_seqlens [b + 1]; p includes the padding.
    """
    lengths, padded = _padded_lengths(cu_seqlens, divisibility_factor)
    tokens = int(lengths.sum())
    for name, ids in (("input_ids", input_ids), ("labels", labels)):
        if ids.shape[-1] != tokens or ids.numel() != tokens:
            raise ValueError(
                f"{name} is {list(ids.shape)}, cu_seqlens bounds {tokens} tokens; give [t] or [1, t]"
            )
    gaps = torch.repeat_interleave((padded - lengths).cumsum(0) - (padded - lengths), lengths)
    where = torch.arange(int(lengths.sum()), device="cpu") + gaps
    total = int(padded.sum())
    results = []
    for ids, filler in ((input_ids, padding_token_id), (labels, padding_label_id)):
        wide = ids.new_full((total,), filler)
        wide[where.to(ids.device)] = ids.flatten()
        results.append(wide)
    return results[0], results[1], _bounds(padded, cu_seqlens)


def generate_positional_ids_for_cp(
    cu_seqlens: Tensor, divisibility_factor: int, dtype: torch.dtype = torch.long
) -> Tensor:
    """Return positions [t] 0, 1, .. in each sequence, which continue in its padding to divisibility_factor."""
    _, padded = _padded_lengths(cu_seqlens, divisibility_factor)
    starts = torch.repeat_interleave(padded.cumsum(0) - padded, padded)
    return (torch.arange(int(padded.sum()), device="cpu") - starts).to(cu_seqlens.device, dtype)


def get_batch_on_this_cp_rank(
    cu_seqlens_padded: Tensor,
    input_ids_padded: Tensor | None,
    labels_padded: Tensor | None,
    position_ids_padded: Tensor | None,
    cp_group: Any = None,
    qvk_format: str = "thd",
    load_balancing_strategy: CPLoadBalancingStrategy = CPLoadBalancingStrategy.DUAL_CHUNK_SWAP,
    *,
    cp_rank: int | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return (input_ids, labels, position_ids), each with the tokens [t / ranks] of one rank; None stays None.

    The three are [t], [1, t] or [t, ..], padded as by `pad_thd_sequences_for_cp`.
    load_balancing_strategy divides the tokens. The number of ranks and this rank come from cp_group
    by torch.distributed.get_world_size and get_rank; None means the default group, which must be
    initialized. cp_rank overrides the rank.

    Raises:
        AssertionError: load_balancing_strategy is not a CPLoadBalancingStrategy.
        ValueError: qvk_format is not "thd", or a tensor has no axis with t tokens.
    """
    CPLoadBalancingStrategy.check(load_balancing_strategy)
    if qvk_format != "thd":
        raise ValueError(
            f"qvk_format={qvk_format!r}: only packed sequences can be split; give 'thd'"
        )
    size = torch.distributed.get_world_size(group=cp_group)
    if size <= 1:
        return input_ids_padded, labels_padded, position_ids_padded
    rank = torch.distributed.get_rank(group=cp_group) if cp_rank is None else cp_rank
    tokens = int(cu_seqlens_padded[-1])
    device, strategy = cu_seqlens_padded.device, load_balancing_strategy
    indices = get_thd_partitioned_indices(cu_seqlens_padded, tokens, size, rank, device, strategy)
    named = (
        ("input_ids", input_ids_padded),
        ("labels", labels_padded),
        ("position_ids", position_ids_padded),
    )
    ids, labels, positions = (
        None if x is None else x.index_select(_token_axis(name, x, tokens), indices.to(x.device))
        for name, x in named
    )
    return ids, labels, positions


def validate_no_load_balance_thd_metadata(
    cu_seqlens: Tensor, cu_seqlens_padded: Tensor, total_tokens: int, cp_size: int
) -> None:
    """Check packed sequences that ranks are to share in contiguous pieces; reads the bounds on the host.

    Args:
        cu_seqlens: Cumulative real token counts [b + 1].
        cu_seqlens_padded: Padded sequence bounds [b + 1].
        total_tokens: Packed tokens on all ranks.
        cp_size: Number of ranks.

    Raises:
        ValueError: The bounds do not delimit sequences in the buffer, or the tokens cannot be divided evenly.
    """
    tokens_of_piece(total_tokens, cp_size)
    if (
        cu_seqlens.ndim != 1
        or cu_seqlens.shape != cu_seqlens_padded.shape
        or cu_seqlens.numel() < 2
    ):
        raise ValueError(
            f"cu_seqlens is {list(cu_seqlens.shape)} and cu_seqlens_padded {list(cu_seqlens_padded.shape)}; "
            "give both [batch + 1]"
        )
    real, padded = cu_seqlens.cpu().long(), cu_seqlens_padded.cpu().long()
    lengths, extents = sequence_lengths(real), sequence_lengths(padded)
    if (
        int(real[0])
        or int(padded[0])
        or bool((lengths < 0).any())
        or bool((lengths > extents).any())
    ):
        raise ValueError(
            f"cu_seqlens={real.tolist()} and cu_seqlens_padded={padded.tolist()} do not bound sequences with padding "
            "behind them; give cumulative lengths from 0, each sequence at most as long as its padded form"
        )
    if int(padded[-1]) != total_tokens:
        raise ValueError(
            f"cu_seqlens_padded ends at {int(padded[-1])}, the buffer has {total_tokens} tokens; give equal numbers"
        )


def get_no_load_balance_thd_causal_metadata(
    cu_seqlens: Tensor, cu_seqlens_padded: Tensor, total_tokens: int, cp_size: int, cp_rank: int
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return the bounds for a rank's one causal attention step, each int32 [b + 1] in a one-element list.

    The arguments are as in `validate_no_load_balance_thd_metadata`, and the rank.

    Returns:
        Cumulative query lengths in the rank's piece, padded sequence bounds in the piece, and
        cumulative visible key lengths, which end with the piece.
    """
    check_rank(cp_size, cp_rank)
    tokens = tokens_of_piece(total_tokens, cp_size)
    piece = piece_of_rank(sequence_lengths(cu_seqlens), cu_seqlens_padded, tokens, cp_rank)
    return [cumulative(piece.lengths_q)], [piece.starts_q], [cumulative(piece.lengths_kv)]


def _token_axis(name: str, x: Tensor, tokens: int) -> int:
    """Return the token axis: the second if it has this length, otherwise the first."""
    for axis in (1, 0):
        if axis < x.ndim and x.shape[axis] == tokens:
            return axis
    raise ValueError(
        f"{name}_padded is {list(x.shape)}, cu_seqlens_padded bounds {tokens} tokens; give [t], [1, t] or [t, ..]"
    )


def _padded_lengths(cu_seqlens: Tensor, multiple: int) -> tuple[Tensor, Tensor]:
    """Return lengths on the host, and the lengths rounded up."""
    if multiple < 1:
        raise ValueError(
            f"divisibility_factor={multiple} is not a divisor; give 2 * (number of ranks)"
        )
    bounds = cu_seqlens.cpu().long()
    lengths = bounds[1:] - bounds[:-1]
    return lengths, (lengths + multiple - 1) // multiple * multiple


def _bounds(lengths: Tensor, like: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(like.device, like.dtype)
