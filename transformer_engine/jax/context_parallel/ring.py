"""out = softmax(scale * q @ k.T) @ v with local queries, and keys and values that move around a device ring.

After n steps every device has received all keys. The softmax state is a running maximum, sum and product
(arXiv:2310.01889). JAX differentiates through the steps.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from ..primitives.attention.descriptor import Segments
from ..primitives.attention.enums import AttnMaskType
from ..primitives.attention.masks import Window, hidden_keys
from ..runtime.manual_axes import cast_varying, varying_axes
from ..sharding import mesh_in_use
from .plan import ContextParallel


class _Running(NamedTuple):
    """For every query [b, h, q]: the greatest score so far, the sum of weights, and their product with values.

    Attributes:
        greatest: Greatest score so far.
        total: Sum of the weights exp(score - greatest).
        product: Sum of weight times value.
    """

    greatest: Array
    total: Array
    product: Array


def ring_attention(
    plan: ContextParallel,
    query: Array,
    key: Array,
    value: Array,
    segments: Segments,
    mask_type: AttnMaskType,
    window: Window | None,
    scale: float,
    sink: Array | None,
) -> Array:
    """Compute out [b, q, h, dv] from arrays whose tokens are sharded over plan.axis; segments: see `plan.segments`."""
    # Bottom-right masks already count positions from the end.
    kind = AttnMaskType.PADDING_CAUSAL_MASK if mask_type.is_causal() else AttnMaskType.PADDING_MASK

    def local(query: Array, key: Array, value: Array, sink: Any, segments: Segments) -> Array:
        batch, queries, heads, _ = query.shape
        groups = key.shape[2]
        grouped = query.reshape(batch, queries, groups, heads // groups, -1)
        rows = (batch, heads, queries, 1)
        if sink is None:
            greatest, total = jnp.full(rows, -jnp.inf), jnp.zeros(rows, jnp.float32)
        else:  # a score without a value
            greatest = lax.stop_gradient(jnp.broadcast_to(sink, rows))
            total = jnp.exp(sink - greatest)
        running = _Running(greatest, total, jnp.zeros((*rows[:3], value.shape[-1]), jnp.float32))
        travelling = (key, value, segments.key, segments.key_position)
        for step in range(plan.devices):
            keys, values, ids, places = travelling
            scores = jnp.einsum(
                "bqgrd,bkgd->bgrqk", grouped, keys, preferred_element_type=jnp.float32
            )
            scores = scores.reshape(batch, heads, queries, -1) * scale
            key_segments = segments._replace(key=ids, key_position=places)
            hidden = hidden_keys(kind, window, key_segments, queries, keys.shape[1])
            running = _add_keys(running, scores, hidden, values)
            if step + 1 < plan.devices:
                travelling = tuple(lax.ppermute(x, plan.axis, plan.neighbours) for x in travelling)
        empty = running.total == 0
        out = jnp.where(empty, 0.0, running.product / jnp.where(empty, 1.0, running.total))
        return jnp.moveaxis(out, 1, 2).astype(query.dtype)

    tokens, everywhere = PartitionSpec(None, plan.axis), PartitionSpec()
    arrays = (tokens, tokens, tokens, everywhere)
    run = _map_over_axis(plan, local, (*arrays, tokens), tokens)
    axes = varying_axes((query, key, value))
    if not axes:
        return run(query, key, value, sink, segments)

    def gradients(*arguments: Any) -> tuple[Any, ...]:
        *inputs, segments, dout = arguments
        # Inside, some JAX operations (products among them) drop the outer varying axes and others keep them. The types
        # of gradients agree if the axes are dropped at the start.
        *inputs, dout = (None if x is None else x * jnp.ones((), x.dtype) for x in (*inputs, dout))
        _, pullback = jax.vjp(functools.partial(local, segments=segments), *inputs)
        *of_tokens, dsink = pullback(dout)
        return (*of_tokens, None if dsink is None else lax.psum(dsink, plan.axis))

    backward = _map_over_axis(plan, gradients, (*arrays, tokens, tokens), arrays)
    return _ring_in_axes(axes, run, backward)(
        *cast_varying(axes, (query, key, value, sink)), segments
    )


def _map_over_axis(plan: ContextParallel, function: Any, in_specs: Any, out_specs: Any) -> Any:
    """Map a function over plan.axis, with partition specs for its arguments and results."""
    return jax.jit(
        jax.shard_map(
            function,
            mesh=mesh_in_use(),
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={plan.axis},
            check_vma=False,
        )
    )


def _ring_in_axes(axes: frozenset[str], run: Any, backward: Any) -> Any:
    """Wrap the ring for use inside a shard_map that tracks varying axes, which JAX does not track in a nested one.

    The derivative rule is outside the nested shard_map and casts the gradients; it recomputes the forward pass.
    """

    @jax.custom_vjp
    def attend(query: Array, key: Array, value: Array, sink: Any, segments: Segments) -> Array:
        return cast_varying(axes, run(query, key, value, sink, segments))

    def rule(saved: Any, dout: Array) -> tuple[Any, ...]:
        return (*cast_varying(axes, backward(*saved, dout)), None)

    attend.defvjp(lambda *operands: (attend(*operands), operands), rule)
    return attend


def _add_keys(running: _Running, scores: Array, hidden: Array | None, values: Array) -> _Running:
    """Add the keys of one device to the running softmax."""
    if hidden is not None:
        scores = jnp.where(hidden, -jnp.inf, scores)
    greatest = jnp.maximum(running.greatest, lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    shift = jnp.where(jnp.isfinite(greatest), greatest, 0.0)
    weights = jnp.exp(scores - shift)
    rescale = jnp.exp(running.greatest - shift)
    batch, heads, queries, keys = weights.shape
    groups = values.shape[2]
    # Weights have the dtype of the values, as on one device.
    narrow = weights.astype(values.dtype).reshape(batch, groups, heads // groups, queries, keys)
    part = jnp.einsum("bgrqk,bkgd->bgrqd", narrow, values, preferred_element_type=jnp.float32)
    product = running.product * rescale + part.reshape(batch, heads, queries, -1)
    return _Running(
        greatest, running.total * rescale + weights.sum(axis=-1, keepdims=True), product
    )
