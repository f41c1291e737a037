"""Hidden keys per query, bool [b or 1, 1, q, k], from a mask type, a window and sequences."""

from __future__ import annotations

import functools
import warnings
from numbers import Integral
from typing import Any

import jax.numpy as jnp
from jax import Array

from ....common.checks import described, whole
from ...runtime.checks import check_array, check_dtype, check_integers, check_mask
from .descriptor import Segments, SequenceDescriptor
from .enums import AttnMaskType

Window = tuple[int, int]
# Longer than every sequence; kernels and masks add it to positions in 32 bits.
_WIDEST = 1 << 29
_UNREAD = {
    AttnMaskType.NO_MASK: ("no_mask", "padding"),
    AttnMaskType.CAUSAL_MASK: ("causal", "padding_causal"),
    AttnMaskType.CAUSAL_BOTTOM_RIGHT_MASK: ("causal_bottom_right", "padding_causal_bottom_right"),
}  # mask types that ignore the mask: (name, type that reads the mask)


def check_window(window_size: object) -> Window | None:
    """Normalize to (left, right), -1 for no limit; None if neither side has a limit.

    Sides are clamped to a length above every sequence's.

    Raises:
        ValueError: window_size is neither None nor a pair of integers >= -1.
    """
    if window_size is None:
        return None
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(
            f"window_size={described(window_size)}; give (left, right), -1 for no limit, or None"
        )
    left, right = window_size
    counts = all(
        isinstance(side, Integral) and not isinstance(side, bool) for side in (left, right)
    )
    if not counts or min(left, right) < -1:
        raise ValueError(
            f"window_size={described(window_size)}; both sides are whole numbers from -1 on"
        )
    if (left, right) == (-1, -1):
        return None
    return min(int(left), _WIDEST), min(int(right), _WIDEST)


def reads_mask(mask_type: AttnMaskType, window: Window | None) -> bool:
    """Whether a mask is read: by padding types, and by causal types with a window, as in the unfused layers."""
    return mask_type.is_padding() or (mask_type.is_causal() and window is not None)


def check_tokens(
    descriptor: SequenceDescriptor | Array | None,
    mask_type: AttnMaskType,
    window: Window | None,
    packed: bool,
    most: int,
    scores: tuple[int, int, int, int],
) -> SequenceDescriptor | Array | None:
    """Check a sequence descriptor and limit it to the first `most` sequences per packed row.

    Args:
        descriptor: Sequences or a mask, or None for whole rows.
        mask_type: Mask type; a mask that the type ignores warns once per process and type.
        window: Sliding window, or None.
        packed: Whether rows contain several sequences (a thd layout).
        most: Most sequences per packed row.
        scores: Score shape [b, h, q, k].

    Raises:
        TypeError: The descriptor is neither a SequenceDescriptor nor an array.
        ValueError: The descriptor does not match the score shape.
    """
    whole("max_segments_per_seq", most)
    if isinstance(descriptor, SequenceDescriptor):
        if packed:
            descriptor.check_segments(most)
        if packed or mask_type.is_padding():
            descriptor.check_lengths(*scores[2:])
        return descriptor.within(most) if packed else descriptor
    if descriptor is not None:
        check_array("sequence_descriptor", descriptor)
    if descriptor is not None and not packed:
        if reads_mask(mask_type, window):
            check_mask(descriptor, scores)
        else:
            _warn_of_mask(mask_type)
    return descriptor


@functools.cache
def _warn_of_mask(mask_type: AttnMaskType) -> None:
    """Warn once per process and type about a mask that the type ignores."""
    name, remedy = _UNREAD[mask_type]
    warnings.warn(
        f"a mask was given under attn_mask_type={name!r}, which does not read it: no key is hidden by it; "
        f"give {remedy!r} to hide the keys where it is True, or leave the mask out",
        stacklevel=3,
    )


def run_length_fill(segment_ids: Array) -> Array:
    """Compute for each token, int32 [b, s], the number of tokens of its sequence in the row; 0 for padding.

    Args:
        segment_ids: Sequence number for each token, integers [b, s], 0 for padding.
    """
    check_integers("segment_ids", segment_ids)
    if segment_ids.ndim != 2:
        raise ValueError(f"segment_ids has shape {segment_ids.shape}; give [batch, tokens]")
    same = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (segment_ids[:, None, :] != 0)
    return jnp.where(segment_ids == 0, 0, same.sum(axis=-1)).astype(jnp.int32)


def make_swa_mask(
    segment_pos_q: Array,
    segment_pos_kv: Array,
    window_size: Window | None = None,
    dtype: Any = jnp.float32,
    segment_ids_q: Array | None = None,
    segment_ids_kv: Array | None = None,
) -> Array:
    """Build a sliding-window mask [b, 1, q, kv], 1 where a query attends to a key.

    Args:
        segment_pos_q: Query positions in their sequences, integers [b, q].
        segment_pos_kv: Key positions in their sequences, integers [b, kv].
        window_size: (left, right) numbers of visible keys on both sides of the diagonal; -1 or None means no limit.
        dtype: Mask dtype.
        segment_ids_q: Query sequence numbers, integers [b, q], 0 for padding. With both segment ids the diagonal
            connects the two sequences' last tokens instead of the first.
        segment_ids_kv: Key sequence numbers, integers [b, kv].

    Raises:
        TypeError: Positions are not integers, or dtype is not an array dtype.
        ValueError: Positions are not matrices, or window_size is not a pair of integers >= -1.
    """
    for name, positions in (("segment_pos_q", segment_pos_q), ("segment_pos_kv", segment_pos_kv)):
        check_integers(name, positions)
        if positions.ndim != 2:
            raise ValueError(f"{name} has shape {positions.shape}; give [batch, tokens]")
    left, right = check_window(window_size) or (-1, -1)
    dtype = check_dtype("dtype", dtype)
    distance = segment_pos_kv[:, None, :] - segment_pos_q[:, :, None]
    if segment_ids_q is not None and segment_ids_kv is not None:
        shift = (
            run_length_fill(segment_ids_kv)[:, None, :] - run_length_fill(segment_ids_q)[:, :, None]
        )
        distance = distance - shift
    inside = jnp.ones(distance.shape, bool)
    if left >= 0:
        inside = inside & (distance >= -left)
    if right >= 0:
        inside = inside & (distance <= right)
    return inside[:, None].astype(dtype)


def hidden_keys(
    mask_type: AttnMaskType,
    window_size: Window | None,
    segments: Segments | None,
    queries: int,
    keys: int,
) -> Array | None:
    """Build a mask bool [b or 1, 1, q, k], True where a key is hidden; None if every query attends to every key.

    Without segments a row is one sequence. Tokens in different sequences are hidden from each other.
    """
    left, right = (-1, -1) if window_size is None else window_size
    if mask_type.is_causal():
        right = 0 if right < 0 else min(right, 0)
    if segments is None:
        if (left, right) == (-1, -1):
            return None
        distance = jnp.arange(keys)[None, :] - jnp.arange(queries)[:, None]
        if mask_type.is_bottom_right():
            distance = distance - (keys - queries)
        hidden = jnp.zeros(distance.shape, bool)
        if left >= 0:
            hidden = hidden | (distance < -left)
        if right >= 0:
            hidden = hidden | (distance > right)
        return hidden[None, None]
    ids = (segments.query, segments.key) if mask_type.is_bottom_right() else (None, None)
    visible = make_swa_mask(
        segments.query_position, segments.key_position, (left, right), bool, *ids
    )
    same = segments.query[:, None, :, None] == segments.key[:, None, None, :]
    return ~(visible & same & (segments.query != 0)[:, None, :, None])
