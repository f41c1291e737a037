"""Reference: out = softmax(scale * q @ k.T + bias) @ v for every mask, bias and sink, differentiated by JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.nn import logsumexp

from ....common.dispatch import Backend
from ..softmax import masked_softmax
from .enums import AttnBiasType, AttnMaskType
from .masks import Window, hidden_keys
from .request import AttentionOperands, AttentionRequest, Parts


def attend(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    bias_type: AttnBiasType,
    hidden: Array | None,
    scale: float,
    sink: Array | None,
    dropped: Callable[[Array], Array] | None = None,
    wide_scores: bool = True,
    modified: Callable[[Array], Array] | None = None,
    max_logit: bool = False,
) -> Any:
    """Compute attention.

    Args:
        query: [b, q, h, d].
        key: [b, k, g, d]; g divides h.
        value: [b, k, g, dv].
        bias: [1 or b, 1 or h, q, k], or None.
        bias_type: Whether the bias is added before or after the scores are scaled.
        hidden: Mask, True where a key is hidden, or None. A row without visible keys is zero.
        scale: Factor of the scores.
        sink: Additional score in the denominator, float32 [1, h or 1, 1, 1], or None.
        dropped: Applies dropout to probabilities [b, h, q, k], or None.
        wide_scores: Whether scores are float32; otherwise they are rounded to query's dtype before the softmax.
        modified: Maps the scores to the softmax input, or None.
        max_logit: Whether to return the largest score of each head too.

    Returns:
        out [b, q, h, dv] in query's dtype; with max_logit a pair: out and the largest scores [h] in the same dtype,
        which have no gradient.
    """
    batch, queries, heads, _ = query.shape
    groups = key.shape[2]
    grouped = query.reshape(batch, queries, groups, heads // groups, query.shape[-1])
    scores = jnp.einsum("bqgrd,bkgd->bgrqk", grouped, key, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, heads, queries, key.shape[1])
    if not wide_scores:
        scores = scores.astype(query.dtype)
    if bias is not None and bias_type is AttnBiasType.PRE_SCALE_BIAS:
        scores = scores + bias.astype(scores.dtype)
    scores = scores.astype(jnp.float32) * scale
    if bias is not None and bias_type is AttnBiasType.POST_SCALE_BIAS:
        scores = scores + bias.astype(jnp.float32)
    if modified is not None:
        scores = modified(scores)
    weights = masked_softmax(scores, hidden, sink).astype(query.dtype)
    if dropped is not None:
        weights = dropped(weights)
    weights = weights.reshape(batch, groups, heads // groups, queries, key.shape[1])
    out = jnp.einsum("bgrqk,bkgd->bqgrd", weights, value, preferred_element_type=jnp.float32)
    out = out.reshape(batch, queries, heads, value.shape[-1]).astype(query.dtype)
    return (out, _max_logits(scores, hidden).astype(query.dtype)) if max_logit else out


def _max_logits(scores: Array, hidden: Array | None) -> Array:
    """Each head's largest visible score [h], from scores [b, h, q, k]; -inf for a head without a visible key."""
    visible = scores if hidden is None else jnp.where(hidden, -jnp.inf, scores)
    return lax.stop_gradient(visible).max(axis=(0, 2, 3))


def largest_logits(call: AttentionOperands) -> Array:
    """Per-head largest logits [h] for a call without a score_mod, whose tokens may be spread over devices."""
    query, key = lax.stop_gradient((call.query, call.key))
    batch, queries, heads, size = query.shape
    grouped = query.reshape(batch, queries, key.shape[2], heads // key.shape[2], size)
    scores = jnp.einsum("bqgrd,bkgd->bgrqk", grouped, key, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, heads, queries, key.shape[1])
    if call.bias is not None and call.bias_type is AttnBiasType.PRE_SCALE_BIAS:
        scores = scores + call.bias.astype(jnp.float32)
    scores = scores * call.scale
    if call.bias is not None and call.bias_type is AttnBiasType.POST_SCALE_BIAS:
        scores = scores + call.bias.astype(jnp.float32)
    return _max_logits(scores, call.hidden()).astype(query.dtype)


def run(call: AttentionOperands, max_logit: bool = False) -> Any:
    """Compute the attention of a call, and the largest logits of its heads if max_logit; see `attend`."""
    return attend(
        call.query,
        call.key,
        call.value,
        call.bias,
        call.bias_type,
        call.hidden(),
        call.scale,
        call.sink,
        call.dropped,
        modified=call.modified,
        max_logit=max_logit,
    )


# one object: equal functions are traced once
_RUN_WITH_MAXIMUM = functools.partial(run, max_logit=True)


def _weights(
    query: Array,
    key: Array,
    level: Array | None,
    scale: float,
    mask: AttnMaskType,
    window: Window | None,
) -> tuple[Array, Array]:
    """Compute exp(scores - level) float32 [b, g, r, q, k], and the level [b, h, q], by default from these keys."""
    batch, queries, heads, size = query.shape
    groups, keys = key.shape[2], key.shape[1]
    grouped = query.reshape(batch, queries, groups, heads // groups, size)
    scores = (
        jnp.einsum("bqgrd,bkgd->bgrqk", grouped, key, preferred_element_type=jnp.float32) * scale
    )
    hidden = hidden_keys(mask, window, None, queries, keys)
    if hidden is not None:
        scores = jnp.where(hidden[:, :, None], -jnp.inf, scores)
    if level is None:
        level = logsumexp(scores, axis=-1).reshape(batch, heads, queries)
    return jnp.exp(scores - level.reshape(*scores.shape[:-1], 1)), level


def forward_part(
    query: Array,
    key: Array,
    value: Array,
    scale: float,
    mask: AttnMaskType,
    window: Window | None = None,
) -> tuple[Array, Array]:
    """See `Parts`; memory holds the scores for these queries and keys only."""
    weights, level = _weights(query, key, None, scale, mask, window)
    # Weights in the values' dtype, as in `attend`.
    out = jnp.einsum(
        "bgrqk,bkgd->bqgrd", weights.astype(value.dtype), value, preferred_element_type=jnp.float32
    )
    return out.reshape(*query.shape[:3], -1).astype(query.dtype), level


def backward_part(
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    level: Array,
    dout: Array,
    scale: float,
    mask: AttnMaskType,
    window: Window | None = None,
) -> tuple[Array, Array, Array]:
    """See `Parts`: ds = p * (dout @ v.T - sum(dout * out)), in float32."""
    product: Any = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    grouped = (*query.shape[:2], key.shape[2], query.shape[2] // key.shape[2], -1)
    weights, _ = _weights(query, key, level, scale, mask, window)
    q, k, v, dy, y = (x.astype(jnp.float32) for x in (query, key, value, dout, out))
    q, dy, y = (x.reshape(grouped) for x in (q, dy, y))
    dv = product("bgrqk,bqgrd->bkgd", weights, dy)
    delta = jnp.einsum("bqgrd,bqgrd->bgrq", dy, y)
    dscores = weights * (product("bqgrd,bkgd->bgrqk", dy, v) - delta[..., None]) * scale
    dq = product("bgrqk,bkgd->bqgrd", dscores, k).reshape(query.shape)
    dk = product("bgrqk,bqgrd->bkgd", dscores, q)
    return dq.astype(query.dtype), dk.astype(key.dtype), dv.astype(value.dtype)


def bind(request: AttentionRequest) -> Any:
    if request.tokens != "part":
        return _RUN_WITH_MAXIMUM if request.max_logit else run
    options = {"mask": request.mask, "window": request.window}
    return Parts(
        functools.partial(forward_part, **options), functools.partial(backward_part, **options)
    )


BACKEND = Backend[AttentionRequest]("reference", bind=bind)
