"""Permutation of tokens to expert order, and its inverse, for mixture-of-experts layers."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..common.checks import accepts_former_keywords, whole
from .functions.ragged_exchange import (
    compute_ragged_all_to_all_params,
    compute_reverse_ragged_all_to_all_params,
    rows_by_shard,
)
from .runtime.checks import (
    check_array,
    check_instance,
    check_integer,
    check_integers,
    check_shaped,
    check_sizes,
    check_values,
    is_known,
    is_symbolic,
)
from .runtime.explicit_axes import replicating_results

__all__ = [
    "PureJaxPermState",
    "compute_ragged_all_to_all_params",
    "compute_reverse_ragged_all_to_all_params",
    "local_permute_after_a2a",
    "local_unpermute_before_a2a",
    "pure_jax_token_combine",
    "pure_jax_token_dispatch",
    "routing_map_to_selected_experts",
    "sort_chunks_by_index",
    "token_combine",
    "token_dispatch",
]


@replicating_results
def token_dispatch(
    inp: Array,
    routing_map: Array,
    num_out_tokens: int,
    probs: Array | None = None,
    align_size: int | None = None,
) -> tuple[Array, Array | None, Array, Array | None, Array]:
    """Sort tokens by expert; differentiable in inp and probs.

    Args:
        inp: Tokens [T, H].
        routing_map: [T, E], nonzero if token t is routed to expert e.
        num_out_tokens: Result rows: all pairs (t, e) before padding; later rows are dropped.
        probs: Weights [T, E], which are sorted too.
        align_size: Pad every expert's rows with zeros to a multiple of this size.

    Returns:
        Rows sorted by expert, their weights [rows], row_id_map, pad_offsets and tokens_per_expert.

        row_id_map is int32 [T, 2 E + 1]. For a token with n experts, columns 0 to n - 1 hold its rows before padding,
        columns E to E + n - 1 the experts, and the last column n; the remaining columns are -1. pad_offsets is int32
        [E], an expert's row shift due to padding, or None without padding. tokens_per_expert is int32 [E] and includes
        padding.
    """
    check_values("inp", inp)
    check_array("routing_map", routing_map)
    row_count: Any = num_out_tokens
    if not is_symbolic(row_count):
        whole("num_out_tokens", num_out_tokens)
    if inp.ndim != 2 or routing_map.ndim != 2 or routing_map.shape[0] != inp.shape[0]:
        raise ValueError(
            f"inp {inp.shape} and routing_map {routing_map.shape}; give [T, H] and [T, E]"
        )
    if 0 in routing_map.shape:
        raise ValueError(
            f"routing_map has shape {routing_map.shape}; give at least one token and one expert"
        )
    if probs is not None:
        check_shaped("probs", probs, routing_map.shape)
    inp, probs = jnp.asarray(inp), None if probs is None else jnp.asarray(probs)
    is_routed = jnp.asarray(routing_map).astype(bool)
    tokens, experts = is_routed.shape
    counts = is_routed.sum(axis=0, dtype=jnp.int32)
    starts = jnp.cumsum(counts) - counts
    rows = jnp.where(
        is_routed, starts[None] + jnp.cumsum(is_routed, axis=0, dtype=jnp.int32) - 1, -1
    )
    rows = jnp.where(rows < num_out_tokens, rows, -1)
    row_id_map = _row_id_map(rows)
    pad_offsets, size = None, num_out_tokens
    if align_size is not None:
        whole("align_size", align_size)
        size = sufficient_rows(num_out_tokens, experts, align_size)
        padded = align_counts(counts, align_size)
        pad_offsets = jnp.cumsum(padded) - padded - starts
        rows, counts = jnp.where(rows < 0, -1, rows + pad_offsets[None]), padded
    # The pair (t, e) for every result row, T * E for padding.
    pairs = jnp.arange(tokens * experts, dtype=jnp.int32)
    places = jnp.where(rows.ravel() < 0, size, rows.ravel())
    source = jnp.full(size, tokens * experts, jnp.int32).at[places].set(pairs, mode="drop")
    out = jnp.asarray(inp).at[source // experts].get(mode="fill", fill_value=0)
    weights = None if probs is None else jnp.ravel(probs).at[source].get(mode="fill", fill_value=0)
    return out, weights, row_id_map, pad_offsets, counts


def align_counts(counts: Array, align_size: int) -> Array:
    """Round token counts per group up to multiples of align_size."""
    return -(-counts // align_size) * align_size


def sufficient_rows(tokens: int, groups: int, align_size: int) -> int:
    """Upper bound of the padded row count of `tokens` tokens in `groups` groups, for any group sizes."""
    return (tokens + groups * (align_size - 1)) // align_size * align_size


@replicating_results
def token_combine(
    inp: Array,
    row_id_map: Array,
    merging_probs: Array | None = None,
    pad_offsets: Array | None = None,
) -> Array:
    """Sum each token's expert rows, weighted by merging_probs if passed: out [T, H] from inp [rows, H].

    Args:
        inp: Rows of all experts [rows, H].
        row_id_map: Map that `token_dispatch` returned, [T, 2 E + 1].
        merging_probs: Weights for all experts [T, E]; None is 1.
        pad_offsets: Padding rows before each expert [E], as `token_dispatch` returned them.
    """
    check_values("inp", inp)
    check_integers("row_id_map", row_id_map)
    if inp.ndim != 2 or row_id_map.ndim != 2 or row_id_map.shape[1] % 2 == 0:
        raise ValueError(
            f"inp {inp.shape} and row_id_map {row_id_map.shape}; give [rows, H] and the [T, 2 E + 1] of token_dispatch"
        )
    experts = (row_id_map.shape[1] - 1) // 2
    for name, array, expected, check in (
        ("merging_probs", merging_probs, (row_id_map.shape[0], experts), check_values),
        ("pad_offsets", pad_offsets, (experts,), check_integers),
    ):
        if array is None:
            continue
        check(name, array)
        if array.shape != expected:
            raise ValueError(f"{name} has shape {array.shape}; this row_id_map needs {expected}")
    rows = row_id_map[:, :experts]
    expert_ids = row_id_map[:, experts : 2 * experts]
    inp, absent = jnp.asarray(inp), rows < 0
    if pad_offsets is not None:
        rows = rows + pad_offsets[jnp.maximum(expert_ids, 0)]
    places = jnp.where(absent, inp.shape[0], rows)
    expert_rows = jnp.asarray(inp).at[places].get(mode="fill", fill_value=0).astype(jnp.float32)
    if merging_probs is not None:
        weights = jnp.take_along_axis(
            merging_probs.astype(jnp.float32), jnp.maximum(expert_ids, 0), axis=1
        )
        expert_rows = expert_rows * jnp.where(absent, 0.0, weights)[..., None]
    return expert_rows.sum(axis=1).astype(inp.dtype)


def _row_id_map(rows: Array) -> Array:
    """Compute the row_id_map for `token_dispatch`; rows [T, E], -1 for a pair without a row."""
    order = jnp.argsort(rows < 0, axis=1, stable=True)
    sorted_rows = jnp.take_along_axis(rows, order, axis=1)
    expert_ids = jnp.where(sorted_rows < 0, -1, order)
    count = (rows >= 0).sum(axis=1, keepdims=True)
    return jnp.concatenate((sorted_rows, expert_ids, count), axis=1).astype(jnp.int32)


@replicating_results
def sort_chunks_by_index(
    inp: Array, split_sizes: Array, sorted_indices: Array
) -> tuple[Array, Array]:
    """Reorder the chunks of inp [rows, H] by sorted_indices; also return row_id_map [rows], each row's new index.

    Args:
        inp: Rows of all chunks [rows, H].
        split_sizes: Rows per chunk, in the order of inp; rows after the last chunk are not moved.
        sorted_indices: Indices of the chunks in their new order.
    """
    check_values("inp", inp)
    if inp.ndim != 2:
        raise ValueError(f"inp has shape {inp.shape}; give [rows, H]")
    check_sizes("split_sizes", split_sizes, None, inp.shape[0])
    count = split_sizes.shape[0]
    check_integers("sorted_indices", sorted_indices)
    if sorted_indices.shape != (count,):
        raise ValueError(
            f"sorted_indices has shape {sorted_indices.shape}; give one number per chunk, ({count},)"
        )
    if is_known(sorted_indices) and not np.array_equal(
        np.sort(np.asarray(sorted_indices)), np.arange(count)
    ):
        raise ValueError(
            f"sorted_indices={np.asarray(sorted_indices).tolist()[:8]}; give the numbers from 0 to {count - 1}, "
            "each once"
        )
    inp, split_sizes, sorted_indices = (jnp.asarray(x) for x in (inp, split_sizes, sorted_indices))
    starts = jnp.cumsum(split_sizes) - split_sizes
    sorted_sizes = split_sizes[sorted_indices]
    moved_starts = (
        jnp.zeros_like(starts).at[sorted_indices].set(jnp.cumsum(sorted_sizes) - sorted_sizes)
    )
    row = jnp.arange(inp.shape[0], dtype=jnp.int32)
    chunk = jnp.searchsorted(jnp.cumsum(split_sizes), row, side="right")
    clamped = jnp.minimum(chunk, starts.shape[0] - 1)
    new_index = jnp.where(
        chunk < starts.shape[0], row - starts[clamped] + moved_starts[clamped], row
    )
    new_index = new_index.astype(jnp.int32)
    source = jnp.zeros_like(row).at[new_index].set(row)
    return inp[source], new_index


class PureJaxPermState(NamedTuple):
    """Permutation from `pure_jax_token_dispatch`: the order of all slots, token count and padding count.

    Args:
        sorted_indices: Source slots in sorted-row order.
        num_real_tokens: Number of slots without padding, T k.
        padding_size: Number of padding slots.
    """

    sorted_indices: Array
    num_real_tokens: int
    padding_size: int


def pure_jax_token_dispatch(
    inputs: Array,
    selected_experts: Array,
    num_experts: int,
    num_experts_per_tok: int,
    align_size: int = 0,
    roll_to_expert_id: Array | int | None = None,
) -> tuple[Array, PureJaxPermState, Array]:
    """Sort inputs [.., H] by selected_experts [.., k]; also return the state and the rows per expert.

    Args:
        inputs: Tokens [.., H].
        selected_experts: Experts for each token [.., k], integers.
        num_experts: Number of experts.
        num_experts_per_tok: Choices per token, k.
        align_size: Pads every expert's rows with zeros to a multiple of this number; 0 does not pad.
        roll_to_expert_id: Expert that comes first; the earlier ones come last. May be traced, for example
            lax.axis_index.
    """
    whole("num_experts", num_experts)
    whole("num_experts_per_tok", num_experts_per_tok)
    whole("align_size", align_size, 0)
    if roll_to_expert_id is not None:
        check_integer("roll_to_expert_id", roll_to_expert_id)
    check_values("inputs", inputs)
    check_integers("selected_experts", selected_experts)
    inputs, selected_experts = jnp.asarray(inputs), jnp.asarray(selected_experts)
    flat = jnp.reshape(inputs, (-1, inputs.shape[-1]))
    experts = selected_experts.reshape(-1).astype(jnp.int32)
    if experts.size != flat.shape[0] * num_experts_per_tok:
        raise ValueError(
            f"selected_experts {selected_experts.shape} of inputs {inputs.shape}; give {num_experts_per_tok} per token"
        )
    if roll_to_expert_id is not None:
        experts = (experts - roll_to_expert_id) % num_experts
    counts = jnp.bincount(experts, length=num_experts)
    padding = num_experts * (align_size - 1) if align_size > 0 else 0
    if padding:
        missing = -counts % align_size
        spare = jnp.arange(padding, dtype=jnp.int32)
        owner, index = spare // (align_size - 1), spare % (align_size - 1)
        # Padding that an expert does not need is placed after all experts.
        experts = jnp.concatenate((experts, jnp.where(index < missing[owner], owner, num_experts)))
        counts = counts + missing
    order = jnp.argsort(experts, stable=True)
    rows = flat.at[order // num_experts_per_tok].get(mode="fill", fill_value=0)
    state = PureJaxPermState(order, flat.shape[0] * num_experts_per_tok, padding)
    return rows, state, counts.astype(jnp.int32)


def pure_jax_token_combine(
    expert_outputs: Array,
    perm_state: PureJaxPermState,
    routing_weights: Array,
    num_experts_per_tok: int,
    batch_size: int | None = None,
    sequence_length: int | None = None,
) -> Array:
    """Compute out [T, H]: a token's rows, multiplied by routing_weights [.., k] and summed.

    Args:
        expert_outputs: Rows of all experts [rows, H].
        perm_state: State that `pure_jax_token_dispatch` returned.
        routing_weights: Weights for the choices [.., k].
        num_experts_per_tok: Choices per token, k.
        batch_size: With sequence_length, whose product is T: the result is [batch_size, sequence_length, H].
        sequence_length: Tokens per sequence.

    Raises:
        ValueError: Shapes do not match, or only one of batch_size and sequence_length is passed.
    """
    check_values("expert_outputs", expert_outputs)
    check_values("routing_weights", routing_weights)
    check_instance("perm_state", perm_state, PureJaxPermState)
    whole("num_experts_per_tok", num_experts_per_tok)
    slots, rows = perm_state.num_real_tokens, perm_state.sorted_indices.shape[0]
    if expert_outputs.ndim != 2 or expert_outputs.shape[0] != rows:
        raise ValueError(
            f"expert_outputs has shape {expert_outputs.shape}; perm_state was made for [{rows}, H]"
        )
    if routing_weights.size != slots or slots % num_experts_per_tok:
        raise ValueError(
            f"routing_weights has shape {routing_weights.shape}; perm_state has {slots} choices, give a weight each, "
            f"num_experts_per_tok={num_experts_per_tok} per token"
        )
    sizes = (batch_size or 0) * (sequence_length or 0)
    if (batch_size, sequence_length) != (None, None) and sizes * num_experts_per_tok != slots:
        raise ValueError(
            f"batch_size={batch_size} and sequence_length={sequence_length} of {slots // num_experts_per_tok} "
            "tokens; give both, with the number of tokens as their product, or neither"
        )
    expert_outputs, routing_weights = jnp.asarray(expert_outputs), jnp.asarray(routing_weights)
    back = jnp.argsort(perm_state.sorted_indices)[: perm_state.num_real_tokens]
    rows = expert_outputs[back].astype(jnp.float32)
    rows = rows.reshape(-1, num_experts_per_tok, expert_outputs.shape[-1])
    weights = routing_weights.reshape(-1, num_experts_per_tok, 1).astype(jnp.float32)
    out = (rows * weights).sum(axis=1).astype(expert_outputs.dtype)
    return out if batch_size is None else out.reshape(batch_size, sequence_length, -1)


def routing_map_to_selected_experts(
    sparse_probs: Array, routing_map: Array, topk: int
) -> tuple[Array, Array]:
    """List the chosen experts int32 [T, topk], sorted, and their weights [T, topk].

    Args:
        sparse_probs: Weights for all experts [T, E].
        routing_map: True at the chosen experts [T, E].
        topk: Choices per token.
    """
    check_array("routing_map", routing_map)
    if routing_map.ndim != 2:
        raise ValueError(f"routing_map has shape {routing_map.shape}; give [tokens, experts]")
    check_shaped("sparse_probs", sparse_probs, routing_map.shape)
    whole("topk", topk)
    if topk > routing_map.shape[1]:
        raise ValueError(
            f"topk={topk} of {routing_map.shape[1]} experts; choose at most {routing_map.shape[1]}"
        )
    _, experts = jax.lax.top_k(routing_map.astype(jnp.int32), topk)
    return experts.astype(jnp.int32), jnp.take_along_axis(sparse_probs, experts, axis=-1)


def local_permute_after_a2a(
    x_recv: Array,
    all_shards_tokens_per_expert: Array,
    shard_id: Array | int,
    num_expert_shards: int,
) -> tuple[Array, Array, Array]:
    """Sort rows by local expert; also return the rows per local expert and the new index for every received row.

    Args:
        x_recv: Rows in reception order: by shard, then by expert.

    The other arguments are as in `compute_ragged_all_to_all_params`.
    """
    shards = num_expert_shards
    counts = rows_by_shard(all_shards_tokens_per_expert, shard_id, shards)[:, shard_id]
    local = counts.shape[1]
    order = jnp.arange(shards * local, dtype=jnp.int32).reshape(shards, local).T.ravel()
    rows, new_index = sort_chunks_by_index(x_recv, counts.ravel(), order)
    return rows, counts.sum(axis=0), new_index


@accepts_former_keywords(goes_to="state")
def local_unpermute_before_a2a(expert_outputs: Array, state: Array) -> Array:
    """Restore the reception order that `local_permute_after_a2a` changed.

    Args:
        expert_outputs: Rows sorted by local expert [rows, H].
        state: New index for every received row, the third result from `local_permute_after_a2a`.
    """
    check_values("expert_outputs", expert_outputs)
    check_integers("state", state)
    if expert_outputs.ndim != 2 or state.shape != expert_outputs.shape[:1]:
        raise ValueError(
            f"expert_outputs {expert_outputs.shape} and state {state.shape}; give [rows, H] and [rows]"
        )
    return jnp.asarray(expert_outputs)[state]
