"""Packed sequences shared by context-parallel ranks: sequence halves, and corrections for partial results.

Legend: t packed tokens on this rank, h heads, b sequences; cu_seqlens int32 [b + 1] bounds the rank's
sequences, every length is even, and a tensor's "first half" contains the first half of every sequence. A softmax
over keys in two parts is combined from each part's output o_i and lse_i = log sum exp:
lse = log(exp(lse_1) + exp(lse_2)), o = sum_i o_i exp(lse_i - lse). Nothing is read on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_engine.pytorch.functions.attention.context_parallel.layout import (
    order_of_ranks,
    partitioned_indices,
    places,
)

__all__ = [
    "thd_copy_valid_tokens_from_per_split_to_rank_local",
    "thd_cp_rank_order_to_sequence_order",
    "thd_get_partitioned_indices",
    "thd_grad_correction",
    "thd_out_correction",
    "thd_read_half_tensor",
    "thd_read_second_half_lse",
    "thd_second_half_lse_correction",
    "thd_sequence_order_to_cp_rank_order",
]


def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half_idx: int) -> Tensor:
    """Select one half of every sequence in [t, h, d], or in keys and values [2, t, h, d]: [.., t / 2, h, d]."""
    axis = tensor.dim() - 3
    return tensor.index_select(axis, _half(cu_seqlens, tensor.shape[axis] // 2, half_idx))


def thd_second_half_lse_correction(
    lse: Tensor, lse_per_step: Tensor, cu_seqlens: Tensor, lse_packed: bool
) -> None:
    """Compute lse[second half] = log(exp(lse[second half]) + exp(lse_per_step)) in place."""
    if lse_packed:
        second = _half(cu_seqlens, lse_per_step.shape[-1], 1)
        lse.index_copy_(1, second, torch.logaddexp(lse.index_select(1, second), lse_per_step))
        return
    # Short sequences leave columns unused: the second half of each begins at its own column.
    column, inside = _padded_second_half(cu_seqlens, lse_per_step.shape[-1], lse.shape[-1])
    column = column[:, None].expand(-1, lse.shape[1], -1)
    old = lse.gather(2, column)
    # Columns after a sequence are written with their old values: such a column is never one of the sequence.
    merged = torch.where(inside[:, None], torch.logaddexp(old, lse_per_step), old)
    lse.scatter_(2, column, merged)


def thd_read_second_half_lse(
    lse: Tensor, cu_seqlens: Tensor, lse_packed: bool, second_half_lse_seqlen: int
) -> Tensor:
    """Select `lse` for every sequence's second half: [h, second_half_lse_seqlen], or [b, h, second_half_lse_seqlen].

    Entries that belong to no token are 0.
    """
    if lse_packed:
        half = lse.index_select(1, _half(cu_seqlens, lse.shape[-1] // 2, 1))
        return torch.nn.functional.pad(half, (0, second_half_lse_seqlen - half.shape[-1]))
    column, inside = _padded_second_half(cu_seqlens, second_half_lse_seqlen, lse.shape[-1])
    read = lse.gather(2, column[:, None].expand(-1, lse.shape[1], -1))
    return torch.where(inside[:, None], read, 0.0)


def thd_out_correction(
    out: Tensor,
    out_per_step: Tensor,
    lse: Tensor,
    lse_per_step: Tensor,
    cu_seqlens: Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    """Compute out += out_per_step * exp(lse_per_step - lse) in place, in float32."""
    rows = out_per_step.shape[0]
    bounds = cu_seqlens // 2 if only_second_half else cu_seqlens
    where = (
        _half(cu_seqlens, rows, 1) if only_second_half else torch.arange(rows, device=out.device)
    )
    if lse_packed:
        weight = torch.exp(lse_per_step[:, :rows] - lse.index_select(1, where)).t()
    else:
        sequence, place = places(bounds, rows)
        start = (cu_seqlens[1:] - cu_seqlens[:-1]).long()[sequence] // 2 if only_second_half else 0
        full_lse = lse[sequence, :, (place + start).clamp(max=lse.shape[-1] - 1)]
        weight = torch.exp(
            lse_per_step[sequence, :, place.clamp(max=lse_per_step.shape[-1] - 1)] - full_lse
        )
    real = (torch.arange(rows, device=out.device) < bounds[-1])[:, None, None]
    added = torch.where(real, out_per_step.float() * weight[:, :, None], 0.0)
    out.index_copy_(0, where, (out.index_select(0, where).float() + added).to(out.dtype))


def thd_grad_correction(
    grad: Tensor, grad_per_step: Tensor, cu_seqlens: Tensor, first_half: str, second_half: str
) -> None:
    """Add or copy the halves of one step's gradient to the accumulated gradient, in place."""
    for name, how in (("first_half", first_half), ("second_half", second_half)):
        if how not in ("add", "copy", "none"):
            raise ValueError(f'{name}={how!r} does not exist; choose "add", "copy" or "none"')
    axis = grad.dim() - 3
    rows = grad.shape[axis] // 2
    alone = grad_per_step.shape[axis] != grad.shape[axis]
    for index, how in enumerate((first_half, second_half)):
        if how == "none":
            continue
        where = _half(cu_seqlens, rows, index)
        part = grad_per_step if alone else grad_per_step.index_select(axis, where)
        if how == "add":
            grad.index_add_(axis, where, part.to(grad.dtype))
        else:
            grad.index_copy_(axis, where, part.to(grad.dtype))


def thd_get_partitioned_indices(
    cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int
) -> Tensor:
    """A rank's token indices, int32 [total_tokens / world_size].

    Each packed sequence has 2 * world_size equal chunks. A rank has the chunks `rank` and 2 * world_size - 1 - rank.
    """
    return partitioned_indices(cu_seqlens, total_tokens, world_size, rank).to(torch.int32)


def thd_sequence_order_to_cp_rank_order(
    tensor: Tensor, cu_seqlens: Tensor, world_size: int, total_tokens: int | None = None
) -> Tensor:
    """Reorder the tokens [t, ..] from full packed sequences to rank order, rank 0 first.

    Raises:
        ValueError: The tensor does not have `total_tokens` rows.
    """
    _check_tokens(tensor, total_tokens)
    return tensor.index_select(0, order_of_ranks(cu_seqlens, tensor.shape[0], world_size))


def thd_cp_rank_order_to_sequence_order(
    tensor: Tensor, cu_seqlens: Tensor, world_size: int, total_tokens: int | None = None
) -> Tensor:
    """Reorder tokens [t, ..] that were gathered rank by rank to sequence order."""
    _check_tokens(tensor, total_tokens)
    order = order_of_ranks(cu_seqlens, tensor.shape[0], world_size)
    return torch.empty_like(tensor).index_copy_(0, order, tensor)


def thd_copy_valid_tokens_from_per_split_to_rank_local(
    out: Tensor, inp: Tensor, cu_seqlens_padded: Tensor, cu_seqlens: Tensor
) -> None:
    """Copy the first len_i rows of each padded sequence: out[p_i : p_i + len_i] = inp[p_i : p_i + len_i], in place.

    Args:
        out: Rows [t, ..], contiguous, of which only these are overwritten.
        inp: Rows with the same shape and dtype.
        cu_seqlens_padded: First row p per sequence, and the end: int32 [b + 1].
        cu_seqlens: Cumulative lengths, int32 [b + 1]: len_i = cu_seqlens[i + 1] - cu_seqlens[i].

    Raises:
        ValueError: `inp` has another shape or dtype than `out`, or `out` is not contiguous.
    """
    if inp.shape != out.shape or inp.dtype != out.dtype or not out.is_contiguous():
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)}, contiguous: {out.is_contiguous()}; inp is {inp.dtype} "
            f"{list(inp.shape)}; give tensors of one shape and dtype, and a contiguous out"
        )
    sequence, place = places(cu_seqlens_padded, out.shape[0])
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    row = torch.arange(out.shape[0], device=out.device)
    inside = (
        (place < lengths[sequence]) & (row < cu_seqlens_padded[-1]) & (row >= cu_seqlens_padded[0])
    )
    out.copy_(torch.where(inside.view(-1, *[1] * (out.dim() - 1)), inp, out))


def _check_tokens(tensor: Tensor, total_tokens: int | None) -> None:
    if total_tokens is not None and total_tokens != tensor.shape[0]:
        raise ValueError(
            f"total_tokens={total_tokens}, but the tensor has {tensor.shape[0]} rows; "
            "give the number of packed tokens, padding included"
        )


def _half(cu_seqlens: Tensor, tokens: int, half_idx: int) -> Tensor:
    """Token indices in the full tensor for one half of every sequence: int64 [tokens]."""
    if half_idx not in (0, 1):
        raise ValueError(f"half_idx={half_idx} is neither 0 (the first half) nor 1 (the second)")
    bounds = cu_seqlens.long()
    sequence, place = places(bounds // 2, tokens)
    half = (bounds[1:] - bounds[:-1])[sequence] // 2
    return bounds[sequence] + place + half_idx * half


def _padded_second_half(cu_seqlens: Tensor, columns: int, limit: int) -> tuple[Tensor, Tensor]:
    """[b, columns]: each second-half token's column in a tensor [b, h, limit], and its validity."""
    half = (cu_seqlens[1:] - cu_seqlens[:-1]).long() // 2
    place = torch.arange(columns, device=cu_seqlens.device)
    # Columns are taken modulo the limit, so that those outside are all different from those inside.
    return (half[:, None] + place) % limit, place < half[:, None]
