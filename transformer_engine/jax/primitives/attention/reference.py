"""out = softmax(scale * q @ k.T + bias) @ v, literally: for every mask, bias and sink, differentiated by JAX."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Backend
from ..softmax import masked_softmax
from .enums import AttnBiasType
from .request import AttentionRequest, Call


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
) -> Array:
    """out [b, q, h, dv] in query's dtype, of query [b, q, h, d], key [b, k, g, d] and value [b, k, g, dv]; g divides h.

    bias          [1 or b, 1 or h, q, k], added before the scores are scaled or after it
    hidden        True where a key is not seen; a row that sees no key is zero
    sink          float32 [1, h or 1, 1, 1]: one more score in the denominator
    dropped       probabilities [b, h, q, k] -> those that are left
    modified      scores [b, h, q, k] -> the scores that the softmax takes
    wide_scores   scores in float32; else rounded to query's dtype before the softmax
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
    return out.reshape(batch, queries, heads, value.shape[-1]).astype(query.dtype)


def run(call: Call) -> Array:
    """The attention of a call."""
    return attend(
        call.query, call.key, call.value, call.bias, call.bias_type, call.hidden(), call.scale, call.sink, call.dropped,
        modified=call.modified,
    )  # fmt: skip


BACKEND = Backend[AttentionRequest]("reference", bind=lambda request: run)
