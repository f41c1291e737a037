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
