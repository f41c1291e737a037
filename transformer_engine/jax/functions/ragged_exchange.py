"""lax.ragged_all_to_all arguments that exchange tokens between the experts' devices."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from ...common.checks import described, whole
from ..runtime.checks import check_integers, is_known


def compute_ragged_all_to_all_params(
    all_shards_tokens_per_expert: Array, shard_id: Array | int, num_expert_shards: int
) -> tuple[Array, Array, Array, Array]:
    """Compute a shard's arguments (input_offsets, send_sizes, output_offsets, recv_sizes), each [R].

    Args:
        all_shards_tokens_per_expert: Rows of every shard for every expert [R, E]; expert e is on shard e // (E / R).
        shard_id: Index of this shard; may be traced.
        num_expert_shards: Number of shards R.
    """
    sent = rows_by_shard(all_shards_tokens_per_expert, shard_id, num_expert_shards).sum(axis=-1)
    send_sizes = sent[shard_id]
    before = jnp.cumsum(sent, axis=0) - sent  # rows that earlier shards send to each shard
    return jnp.cumsum(send_sizes) - send_sizes, send_sizes, before[shard_id], sent[:, shard_id]


def compute_reverse_ragged_all_to_all_params(
    all_shards_tokens_per_expert: Array, shard_id: Array | int, num_expert_shards: int
) -> tuple[Array, Array, Array, Array]:
    """Compute the arguments of the inverse exchange: received rows are sent back to their origin.

    Args:
        shard_id: Index of this shard; may be traced.

    The other arguments are as in `compute_ragged_all_to_all_params`.
    """
    sent = rows_by_shard(all_shards_tokens_per_expert, shard_id, num_expert_shards).sum(axis=-1)
    received = sent[:, shard_id]
    # offsets at which a shard stores the rows of each shard
    offsets = jnp.cumsum(sent, axis=1) - sent
    return jnp.cumsum(received) - received, received, offsets[:, shard_id], sent[shard_id]


def rows_by_shard(tokens_per_expert: Array, shard_id: Array | int, shards: int) -> Array:
    """Return counts [from, to, local expert]: the rows that a shard sends to an expert on a shard."""
    whole("num_expert_shards", shards)
    check_integers("all_shards_tokens_per_expert", tokens_per_expert)
    shape = tokens_per_expert.shape
    if len(shape) != 2 or shape[0] != shards or shape[1] % shards:
        raise ValueError(
            f"all_shards_tokens_per_expert has shape {shape}; give [{shards}, experts], of which {shards} is a divisor"
        )
    if not is_known(shard_id):
        return jnp.asarray(tokens_per_expert).reshape(shards, shards, -1)
    number = np.asarray(shard_id)
    if number.ndim or not np.issubdtype(number.dtype, np.integer) or not 0 <= number < shards:
        raise ValueError(
            f"shard_id={described(shard_id)} of {shards} shards; give a whole number from 0 to {shards - 1}"
        )
    return jnp.asarray(tokens_per_expert).reshape(shards, shards, -1)
