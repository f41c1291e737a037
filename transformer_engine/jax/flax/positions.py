"""Token positions: rotary embedding for queries and keys, and T5's relative score biases."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array, lax

from ...common.checks import described, number, suggests_keywords, switch, whole
from ..primitives.rope import rotate, rotate_packed
from ..runtime.checks import check_extent, check_values
from .base import check_call, parameter

_METHODS = ("consecutive", "alternate")


def rotary_pos_emb(
    x: Array,
    windows: tuple[float, float],
    transpose_batch_sequence: bool,
    group_method: str = "consecutive",
) -> Array:
    """Apply the rotary position embedding of RoFormer (arXiv:2104.09864) to queries or keys.

    Feature pair i is rotated by the angle position / timescale, with timescale = least * (greatest / least) ** (2 i /
    d).

    Args:
        x: Queries or keys [b, s, h, d] with an even d; [s, b, h, d] if transpose_batch_sequence.
        windows: (least, greatest) timescale, both positive.
        transpose_batch_sequence: Whether the sequence axis precedes the batch axis.
        group_method: Feature pairs: "consecutive" (2 i, 2 i + 1), or "alternate" (i, i + d / 2).

    Returns:
        The rotated array, with x's shape and dtype.

    Raises:
        ValueError: The shape of x, windows or group_method is outside its range.
    """
    check_values("x", x)
    switch("transpose_batch_sequence", transpose_batch_sequence)
    if x.ndim != 4:
        raise ValueError(f"x has shape {x.shape}; it must be [b, s, h, d] with an even d")
    tokens = x.shape[0 if transpose_batch_sequence else 1]
    return rotate_tokens(x, windows, transpose_batch_sequence, group_method, 0, tokens)


def rotate_tokens(
    x: Array,
    windows: tuple[float, float],
    transposed: bool,
    group_method: str,
    position: Array | int,
    length: int,
) -> Array:
    """Apply `rotary_pos_emb` to consecutive tokens from `position` on, in a sequence with at most `length` tokens."""
    if x.ndim != 4 or x.shape[-1] % 2:
        raise ValueError(f"x has shape {x.shape}; it must be [b, s, h, d] with an even d")
    tokens = x.shape[0 if transposed else 1]
    table = _angles(windows, group_method, length, x.shape[-1])
    if tokens != length:
        table = lax.dynamic_slice_in_dim(table, position, tokens)
    return rotate(x, table, group_method == "consecutive", transposed)


def rotate_joint_projection(
    packed: Array, heads: int, windows: tuple[float, float], transposed: bool, group_method: str
) -> tuple[Array, Array, Array]:
    """Split a joint projection into queries, keys and values, and apply `rotary_pos_emb` to queries and keys.

    Args:
        packed: Queries, keys and values [b, s, 3, h * d]; [s, b, 3, h * d] if transposed.
        heads: Number of heads h.
        windows: See `rotary_pos_emb`.
        transposed: The first axis of packed is the sequence.
        group_method: See `rotary_pos_emb`.

    Returns:
        Queries, keys and values, each [b, s, h, d]; [s, b, h, d] if transposed.
    """
    width = packed.shape[-1] // heads
    if width % 2:
        raise ValueError(
            f"head_dim={width} is odd; rotary embedding rotates pairs of features, choose an even one"
        )
    table = _angles(windows, group_method, packed.shape[0 if transposed else 1], width)
    return rotate_packed(packed, table, heads, group_method == "consecutive", transposed)


def _angles(windows: tuple[float, float], group_method: str, length: int, width: int) -> Array:
    """Compute the rotation angles for `length` positions, float32 [length, width / 2]."""
    if not isinstance(group_method, str) or group_method not in _METHODS:
        raise ValueError(
            f"group_method={described(group_method)}; choose 'consecutive' or 'alternate'"
        )
    pair = isinstance(windows, (tuple, list)) and len(windows) == 2
    for timescale in windows if pair else ():
        number("windows", timescale)
    if not pair or not (windows[0] > 0 and windows[1] > 0):
        raise ValueError(
            f"windows={described(windows)}; pass the timescales of the first and the last pair, both above 0"
        )
    shortest, longest = windows
    timescales = shortest * (longest / shortest) ** (2 * np.arange(width // 2) / width)
    check_extent("the length of rows", length, "the table of angles has one row per token")
    return jnp.asarray(np.arange(length)[:, None] / timescales, jnp.float32)


@suggests_keywords
class RelativePositionBiases(nn.Module):
    """T5's relative position biases (arXiv:1910.10683): one parameter per head and distance bucket.

    The parameter is `rel_embedding` [heads, buckets]. One half of the buckets hold one distance each. The sizes of the
    other buckets increase logarithmically up to max_distance.

    Args:
        num_buckets: Number of buckets, at least 2.
        max_distance: Distance from which all distances share the last bucket.
        num_attention_heads: Number of heads.
        embedding_init: Parameter initializer; the default scales a uniform distribution by both extents' mean.
        embedding_axes: Logical axes for the parameter.
        dtype: Parameter and bias dtype.
    """

    num_buckets: int
    max_distance: int
    num_attention_heads: int
    embedding_init: Callable[..., Array] = nn.initializers.variance_scaling(
        1.0, "fan_avg", "uniform"
    )
    embedding_axes: tuple[str | None, ...] = ("heads", "relpos_buckets")
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, q_seqlen: int, k_seqlen: int, bidirectional: bool = True) -> Array:
        """Compute the bias [1, heads, q_seqlen, k_seqlen].

        Args:
            q_seqlen: Number of queries.
            k_seqlen: Number of keys.
            bidirectional: Whether keys after the query have separate buckets; otherwise they share the bucket for
                distance 0.
        """
        check_call(self)
        for name in ("num_buckets", "max_distance", "num_attention_heads"):
            whole(name, getattr(self, name), 2 if name == "num_buckets" else 1)
        for name, extent in (("q_seqlen", q_seqlen), ("k_seqlen", k_seqlen)):
            check_extent(name, extent, "the buckets of distances are numbers")
        buckets = _buckets(q_seqlen, k_seqlen, bidirectional, self.num_buckets, self.max_distance)
        shape = (self.num_attention_heads, self.num_buckets)
        embedding = parameter(
            self, "rel_embedding", self.embedding_init, self.embedding_axes, shape, self.dtype
        )
        return jnp.asarray(embedding, self.dtype)[None][:, :, buckets]


def _buckets(
    queries: int, keys: int, bidirectional: bool, count: int, max_distance: int
) -> np.ndarray:
    """Bucket for every query and key pair, integers [queries, keys]."""
    back = np.arange(queries)[:, None] - np.arange(keys)[None, :]
    first = np.zeros_like(back)
    if bidirectional:
        count //= 2
        first = np.where(back < 0, count, 0)
        back = np.abs(back)
    back = np.maximum(back, 0)
    exact = count // 2
    if not 0 < exact < max_distance:
        raise ValueError(
            f"max_distance={max_distance} and {count} buckets per direction, {exact} of which hold one distance "
            "each; pass at least 2 buckets per direction, and a max_distance above those distances"
        )
    # T5 computes the logarithm in float32, and its rounding decides the buckets for distances at a boundary.
    ratio = np.log(np.maximum(back, 1).astype(np.float32) / exact + np.finfo(np.float32).eps)
    far = exact + (ratio / math.log(max_distance / exact) * (count - exact)).astype(np.int32)
    return first + np.where(back < exact, back, np.minimum(far, count - 1))
