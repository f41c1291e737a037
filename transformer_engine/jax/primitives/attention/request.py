"""Attention records: request, operands, and functions for part of the keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from .enums import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout


class AttentionRequest(NamedTuple):
    """Call shapes, dtypes and options that determine its backend.

    Attributes:
        rows: Which tokens belong together: "whole" rows, "lengths", "segments" or a "mask".
        segments: Most sequences in a packed row.
        batch: Smallest possible number of rows on a device; 1 if the number is symbolic.
        modified: Whether a score_mod is applied between the scores and the softmax.
        tokens: "whole" sequences on one device; one "part" for some keys, see `Parts`; or "spread" over devices, with
            options that parts do not support.
        max_logit: Whether the result is a pair: the output and the largest logit of each head [h], in query's dtype.
    """

    dtype: jnp.dtype
    layout: QKVLayout
    bias: AttnBiasType
    mask: AttnMaskType
    softmax: AttnSoftmaxType
    dropout: float
    query_heads: int
    key_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    window: tuple[int, int] | None
    training: bool
    platform: str
    rows: str = "whole"
    modified: bool = False
    segments: int = 1
    tokens: str = "whole"
    batch: int = 1
    max_logit: bool = False


def spread_unsupported_reason(request: AttentionRequest) -> str | None:
    """Reason why single-device kernels do not support tokens that are spread over devices, or None."""
    if request.tokens == "spread":
        return (
            "tokens over devices with packed or padded rows, a bias, dropout, a causal mask or a window of other keys "
            "than queries, or a shard_map with check_vma around; parts of an attention have none"
        )
    return None


class Parts(NamedTuple):
    """Attention functions for some of the keys, from which attention to all keys is assembled.

    Attributes:
        forward: (q, k, v, scale) -> out [b, q, h, dv] in q's dtype, level float32 [b, h, q] = log(sum(exp(scores))).
        backward: (q, k, v, out, level, dout, scale) -> dq, dk, dv: the share of these keys in the gradients of the full
            attention, from its output and level.
    """

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, Array, Array]]


@dataclass(frozen=True)
class AttentionOperands:
    """Attention arrays, and functions that compute further arrays; see `reference.attend` and `fused_attn`.

    Attributes:
        hidden: Computes the hidden-key mask, from the mask, the window and the sequences.
        lengths: Query and key lengths [b], if only lengths hide tokens.
        bounds: Computes packed-row bounds; see `SequenceDescriptor.bounds`.
        draw: Draws 32-bit words [3] from the dropout key; None without dropout.
    """

    query: Array
    key: Array
    value: Array
    bias: Array | None
    bias_type: AttnBiasType
    mask_type: AttnMaskType
    window: tuple[int, int] | None
    hidden: Callable[[], Array | None]
    lengths: tuple[Array, Array] | None
    scale: float
    sink: Array | None
    dropped: Callable[[Array], Array] | None
    modified: Callable[[Array], Array] | None
    bounds: Callable[[], tuple[Array, Array, Array, Array]]
    draw: Callable[[], Array] | None
