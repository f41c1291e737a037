"""What backends judge of an attention, and what they are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from .enums import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout


class AttentionRequest(NamedTuple):
    """Shapes, dtypes and options of one call; never values.

    rows       what says which tokens belong together: "whole" rows, "lengths", "segments" or a "mask"
    segments   sequences that a packed row has at most
    modified   does a score_mod stand between scores and softmax?
    tokens     "whole" sequences on one device; a "part" of the keys, as `Parts` computes it; or "spread" over devices,
               with what parts do not have
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

    def refuses_tokens(self) -> str | None:
        """Why kernels of one device do not take tokens that lie over several."""
        if self.tokens == "spread":
            return (
                "tokens over devices with packed or padded rows, a bias, dropout, a window without a causal mask, a "
                "causal mask of other keys than queries, or a shard_map with check_vma around; parts of an attention "
                "have none"
            )
        return None


class Parts(NamedTuple):
    """Attention to some of the keys, of which an attention to all of them is put together.

    forward    (q, k, v, scale) -> out [b, q, h, dv] in q's dtype, level float32 [b, h, q]: log(sum(exp(scores)))
    backward   (q, k, v, out, level, dout, scale) -> dq, dk, dv: the part of these keys in the gradients of the whole
               attention, whose output and level are given
    """

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, Array, Array]]


@dataclass(frozen=True)
class Call:
    """The arrays of one attention, and what is done with them; see `reference.attend` and `fused_attn`.

    hidden    all that hides keys: mask, window and sequences
    lengths   of queries and keys [b], where they alone hide tokens
    bounds    of packed rows, see `SequenceDescriptor.bounds`
    draw      32-bit words [3] of the key that dropout draws from; None without dropout
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
