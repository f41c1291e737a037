"""out = softmax(scale * q @ k.T) @ v, with queries where they are and keys and values going round the devices.

After n steps every device has seen all keys. The softmax is kept as a running maximum, sum and product
(arXiv:2310.01889); JAX differentiates through the steps.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from ..manual_axes import varies_over, vary_over
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
    # Bottom-right places are counted from the end already.
    kind = AttnMaskType.PADDING_CAUSAL_MASK if mask_type.is_causal() else AttnMaskType.PADDING_MASK

    def local(query: Array, key: Array, value: Array, sink: Any, segments: Segments) -> Array:
        return _local(plan, query, key, value, segments, kind, window, scale, sink)

    tokens, everywhere = PartitionSpec(None, plan.axis), PartitionSpec()
    arrays = (tokens, tokens, tokens, everywhere)
    run = _mapped(plan, local, (*arrays, tokens), tokens)
    axes = varies_over((query, key, value))
    if not axes:
        return run(query, key, value, sink, segments)

    def gradients(*arguments: Any) -> tuple[Any, ...]:
        *given, segments, dout = arguments
        # In here JAX forgets what varies around in some operations (products among them) and keeps it in others: types
        # of gradients agree where it is forgotten from the start.
        *given, dout = (None if x is None else x * jnp.ones((), x.dtype) for x in (*given, dout))
        _, pullback = jax.vjp(functools.partial(local, segments=segments), *given)
        *of_tokens, dsink = pullback(dout)
        return (*of_tokens, None if dsink is None else lax.psum(dsink, plan.axis))

    backward = _mapped(plan, gradients, (*arrays, tokens, tokens), arrays)
    return _within(axes, run, backward)(*vary_over(axes, (query, key, value, sink)), segments)


def _mapped(plan: ContextParallel, function: Any, given: Any, made: Any) -> Any:
    return jax.jit(
        jax.shard_map(
            function,
            mesh=mesh_in_use(),
            in_specs=given,
            out_specs=made,
            axis_names={plan.axis},
            check_vma=False,
        )
    )


def _within(axes: frozenset[str], run: Any, backward: Any) -> Any:
    """The ring within a shard_map that counts what varies over axes, as JAX does not count in a shard_map within it.

    The rule stands outside of the inner one, and says what gradients vary over; it computes the forward again.
    """

    @jax.custom_vjp
    def attend(query: Array, key: Array, value: Array, sink: Any, segments: Segments) -> Array:
        return vary_over(axes, run(query, key, value, sink, segments))

    def rule(saved: Any, dout: Array) -> tuple[Any, ...]:
        return (*vary_over(axes, backward(*saved, dout)), None)

    attend.defvjp(lambda *given: (attend(*given), given), rule)
    return attend


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
