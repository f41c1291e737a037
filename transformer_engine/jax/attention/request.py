"""What backends judge of an attention."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from .enums import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout


class AttentionRequest(NamedTuple):
    """Shapes, dtypes and options of one call; never values."""

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
