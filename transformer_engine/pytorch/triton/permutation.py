"""Token permutation by mask and by chunks, with NVIDIA's Triton wrapper arguments.

`transformer_engine.pytorch.permutation` has the differentiable functions, which check their arguments.
"""

from __future__ import annotations

from torch import Tensor

from ..primitives.permutation import (
    INDEX,
    MASK,
    Routes,
    collect,
    rows_of_chunks,
    rows_of_mask,
    send,
    send_weighted,
)

__all__ = [
    "make_chunk_sort_map",
    "make_row_id_map",
    "permute_with_mask_map",
    "sort_chunks_by_map",
    "unpermute_with_mask_map",
    "unpermute_with_mask_map_bwd_with_merging_probs",
]


def make_row_id_map(routing_map: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    """Return the map int32 [T, 2 E + 1] for a mask.

    Args:
        routing_map: Mask [T, E]: not 0 if an expert processes a token.
        num_tokens: T.
        num_experts: E.

    Returns:
        For each token its rows in descending order, from column E on their experts, and in column 2 E their number.
        Other cells are arbitrary.
    """
    return rows_of_mask(routing_map.view(num_tokens, num_experts))


def permute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    scale: Tensor | None,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
    scale_hidden_dim: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Copy tokens to the rows of a map.

    Args:
        inp: Tokens [T, hidden_size].
        row_id_map: Returned by `make_row_id_map`.
        probs: Probabilities [T, E]; a row with probability 0 is zero.
        scale: Scales [T, scale_hidden_dim] that are copied with the tokens.
        pad_offsets: int64 [E], added to the rows of each expert.
        num_tokens: T.
        num_experts: E.
        num_out_tokens: Result rows.
        hidden_size: Elements per token.
        scale_hidden_dim: Scales per token.

    Returns:
        `(rows [num_out_tokens, hidden_size], their scales or None, their probabilities [num_out_tokens] or None)`.
        Rows without a token are zero.
    """
    routes = Routes(row_id_map, MASK, num_tokens, num_experts, pad_offsets)
    rows, row_probs = send(inp.view(num_tokens, hidden_size), routes, num_out_tokens, probs)
    row_scales = None if scale is None else send(scale.contiguous(), routes, num_out_tokens)[0]
    return rows, row_scales, row_probs


def unpermute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None,
    permuted_probs: Tensor | None,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor | None]:
    """Sum the rows of each token in float32.

    Args:
        inp: Rows [R, hidden_size].
        row_id_map: Returned by `make_row_id_map`.
        merging_probs: Row weights [T, E].
        permuted_probs: Values [R] that are copied back to their tokens and experts.
        pad_offsets: int64 [E], added to the rows of each expert.
        num_tokens: T.
        num_experts: E.
        hidden_size: Elements per row.

    Returns:
        `(tokens [T, hidden_size], the values [T, E] or None)`; a value without a row is 0.
    """
    routes = Routes(row_id_map, MASK, num_tokens, num_experts, pad_offsets)
    return collect(inp.view(-1, hidden_size), routes, merging_probs, permuted_probs)


def unpermute_with_mask_map_bwd_with_merging_probs(
    fwd_output_grad: Tensor,
    row_id_map: Tensor,
    fwd_input: Tensor,
    merging_probs: Tensor,
    pad_offsets: Tensor | None,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of `unpermute_with_mask_map` with merging probabilities.

    Args:
        row_id_map: Map that `make_row_id_map` returned.
        merging_probs: Forward-pass probabilities [T, E].
        pad_offsets: Padding rows before each expert [E], or None.
        num_tokens: T.
        num_experts: E.
        num_out_tokens: `fwd_input` rows.
        hidden_size: Features per token.
        fwd_output_grad: Token gradient [T, hidden_size].
        fwd_input: Forward-pass rows [num_out_tokens, hidden_size].

    Returns:
        `(gradient of the rows [num_out_tokens, hidden_size], gradient of merging_probs [T, E])`.
    """
    routes = Routes(row_id_map, MASK, num_tokens, num_experts, pad_offsets)
    gradient = fwd_output_grad.view(num_tokens, hidden_size)
    return send_weighted(gradient, routes, num_out_tokens, merging_probs, fwd_input)


def make_chunk_sort_map(
    split_sizes: Tensor, sorted_indices: Tensor, num_tokens: int, num_splits: int
) -> Tensor:
    """Return the map int32 [T] that moves chunk sorted_indices[i] to place i: the new row of each row.

    Args:
        split_sizes: Rows per chunk, [num_splits].
        sorted_indices: Chunk order, [num_splits].
        num_tokens: T.
        num_splits: Chunk count.
    """
    return rows_of_chunks(split_sizes.view(num_splits), sorted_indices.view(num_splits), num_tokens)


def sort_chunks_by_map(
    inp: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    num_tokens: int,
    hidden_size: int,
    is_forward: bool,
) -> tuple[Tensor, Tensor | None]:
    """Move rows as `make_chunk_sort_map` maps them, or back.

    Args:
        inp: Rows [T, hidden_size].
        row_id_map: Returned by `make_chunk_sort_map`.
        probs: Values [T] that are moved with the rows.
        num_tokens: T.
        hidden_size: Elements per row.
        is_forward: False moves the rows back.

    Returns:
        `(rows [T, hidden_size], the values [T] or None)`.
    """
    routes = Routes(row_id_map, INDEX, num_tokens, 1)

    def moved(x: Tensor) -> Tensor:
        return (
            send(x, routes, num_tokens, every_row=True)[0] if is_forward else collect(x, routes)[0]
        )

    rows = moved(inp.view(num_tokens, hidden_size))
    return rows, None if probs is None else moved(probs.view(num_tokens, 1)).view(num_tokens)
