"""out = softmax(scale * q @ k.T) @ v, with queries where they are and keys and values going round the devices.

After n steps every device has seen all keys. The softmax is kept as a running maximum, sum and product
(arXiv:2310.01889); JAX differentiates through the steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from ..primitives.attention.descriptor import Segments
from ..primitives.attention.enums import AttnMaskType
from ..primitives.attention.masks import Window, hidden_keys
from ..sharding import mesh_in_use
from .plan import ContextParallel


class _Running(NamedTuple):
    """Of every query [b, h, q]: the greatest score so far, the sum of weights, and their product with values."""

    greatest: Array
    total: Array
    product: Array


def ring_attention(
    plan: ContextParallel, query: Array, key: Array, value: Array, segments: Segments, mask_type: AttnMaskType,
    window: Window | None, scale: float, sink: Array | None,
) -> Array:  # fmt: skip
    """out [b, q, h, dv] of arrays whose tokens are laid over plan.axis; segments as `plan.segments` makes them."""
    tokens = PartitionSpec(None, plan.axis)
    # Bottom-right places are counted from the end already.
    kind = AttnMaskType.PADDING_CAUSAL_MASK if mask_type.is_causal() else AttnMaskType.PADDING_MASK

    def local(query: Array, key: Array, value: Array, segments: Segments, sink: Any) -> Array:
        return _local(plan, query, key, value, segments, kind, window, scale, sink)

    mapped = jax.shard_map(
        local,
        mesh=mesh_in_use(),
        in_specs=(tokens, tokens, tokens, tokens, PartitionSpec()),
        out_specs=tokens,
        axis_names={plan.axis},
        check_vma=False,
    )
    return jax.jit(mapped)(query, key, value, segments, sink)


def _local(
    plan: ContextParallel, query: Array, key: Array, value: Array, segments: Segments, mask_type: AttnMaskType,
    window: Window | None, scale: float, sink: Array | None,
) -> Array:  # fmt: skip
    batch, queries, heads, _ = query.shape
    groups = key.shape[2]
    grouped = query.reshape(batch, queries, groups, heads // groups, -1)
    running = _begin((batch, heads, queries), value.shape[-1], sink)
    travelling = (key, value, segments.key, segments.key_position)
    for step in range(plan.devices):
        keys, values, ids, places = travelling
        scores = jnp.einsum("bqgrd,bkgd->bgrqk", grouped, keys, preferred_element_type=jnp.float32)
        scores = scores.reshape(batch, heads, queries, -1) * scale
        seen = segments._replace(key=ids, key_position=places)
        hidden = hidden_keys(mask_type, window, seen, queries, keys.shape[1])
        running = _added(running, scores, hidden, values)
        if step + 1 < plan.devices:
            travelling = tuple(lax.ppermute(x, plan.axis, plan.neighbours) for x in travelling)
    empty = running.total == 0
    out = jnp.where(empty, 0.0, running.product / jnp.where(empty, 1.0, running.total))
    return jnp.moveaxis(out, 1, 2).astype(query.dtype)


def _begin(rows: tuple[int, int, int], value_dim: int, sink: Array | None) -> _Running:
    """Before the first keys: nothing, or the sink, a score without a value."""
    product = jnp.zeros((*rows, value_dim), jnp.float32)
    if sink is None:
        return _Running(jnp.full((*rows, 1), -jnp.inf), jnp.zeros((*rows, 1), jnp.float32), product)
    greatest = lax.stop_gradient(jnp.broadcast_to(sink, (*rows, 1)))
    return _Running(greatest, jnp.exp(sink - greatest), product)


def _added(running: _Running, scores: Array, hidden: Array | None, values: Array) -> _Running:
    """The running softmax with the keys of one device."""
    if hidden is not None:
        scores = jnp.where(hidden, -jnp.inf, scores)
    greatest = jnp.maximum(running.greatest, lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    shift = jnp.where(jnp.isfinite(greatest), greatest, 0.0)
    weights = jnp.exp(scores - shift)
    kept = jnp.exp(running.greatest - shift)
    batch, heads, queries, keys = weights.shape
    groups = values.shape[2]
    # Weights in the values' dtype, as on one device.
    narrow = weights.astype(values.dtype).reshape(batch, groups, heads // groups, queries, keys)
    part = jnp.einsum("bgrqk,bkgd->bgrqd", narrow, values, preferred_element_type=jnp.float32)
    product = running.product * kept + part.reshape(batch, heads, queries, -1)
    return _Running(greatest, running.total * kept + weights.sum(axis=-1, keepdims=True), product)
