"""SequenceDescriptor: sequences in padded or packed rows, in one of three forms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ....common.checks import described
from ...runtime.checks import is_known
from .enums import AttnMaskType, QKVLayout

Pair = tuple[Array, Array]


class Segments(NamedTuple):
    """For queries and keys: every token's sequence number [b, s], 0 for padding, and its position in the sequence.

    Attributes:
        query: Sequence number of each query token.
        key: Sequence number of each key token.
        query_position: Position of each query token in its sequence.
        key_position: Position of each key token in its sequence.
    """

    query: Array
    key: Array
    query_position: Array
    key_position: Array


def _empty() -> Pair:
    return jnp.zeros((0,), jnp.int32), jnp.zeros((0,), jnp.int32)


def _pair(name: str, value: Any) -> Pair:
    """Pair one array for both queries and keys, or one for each."""
    if not isinstance(value, (tuple, list)):
        value = (value, value)
    if len(value) != 2:
        raise ValueError(
            f"{name} has {len(value)} members; give one array, or two for queries and keys"
        )
    for array in value:
        if not isinstance(array, (jax.Array, np.ndarray)) or not jnp.issubdtype(
            array.dtype, jnp.integer
        ):
            raise TypeError(f"{name} holds {described(array)}; give arrays of integers")
        if array.ndim not in (1, 2):
            raise ValueError(f"{name} has shape {array.shape}; give [batch] or [batch, ..]")
    queries, keys = value
    return jnp.asarray(queries, jnp.int32), jnp.asarray(keys, jnp.int32)


@jax.tree_util.register_pytree_node_class
@dataclass
class SequenceDescriptor:
    """Four (query, key) pairs; a pair that a form does not use has empty arrays.

    Args:
        seqlens: Sequence lengths, int32 [b] or [b, segments].
        seq_offsets: Packed-sequence offsets, int32 [b, segments + 1].
        segment_ids: Segment number for each token, int32 [b, s]; 0 is padding.
        segment_pos: Token positions within their segments, int32 [b, s].
    """

    seqlens: Pair
    seq_offsets: Pair
    segment_ids: Pair
    segment_pos: Pair

    def tree_flatten(self) -> tuple[tuple[Pair, ...], None]:
        return (self.seqlens, self.seq_offsets, self.segment_ids, self.segment_pos), None

    @classmethod
    def tree_unflatten(cls, static: None, children: tuple[Pair, ...]) -> SequenceDescriptor:
        return cls(*children)

    @classmethod
    def from_seqlens(cls, seqlens: Array | Pair) -> SequenceDescriptor:
        """Describe one sequence per row: lengths [b], at least 0; attention raises ValueError for others."""
        return cls(_pair("seqlens", seqlens), _empty(), _empty(), _empty())

    @classmethod
    def from_seqlens_and_offsets(
        cls, seqlens: Array | Pair, seq_offsets: Array | Pair
    ) -> SequenceDescriptor:
        """Describe packed rows: lengths [b, segments] and starts [b, segments + 1]; -1 for absent sequences."""
        lengths, offsets = _pair("seqlens", seqlens), _pair("seq_offsets", seq_offsets)
        for length, offset in zip(lengths, offsets, strict=True):
            expected = (*length.shape[:-1], length.shape[-1] + 1)
            if length.ndim != 2 or offset.shape != expected:
                raise ValueError(
                    f"seqlens {length.shape} and seq_offsets {offset.shape}; give [b, n] lengths and [b, n + 1] offsets"
                )
        return cls(lengths, offsets, _empty(), _empty())

    @classmethod
    def from_segment_ids_and_pos(
        cls, segment_ids: Array | Pair, segment_pos: Array | Pair | None = None
    ) -> SequenceDescriptor:
        """Describe tokens by sequence numbers [b, s], from 1, 0 for padding, and their positions in the sequence."""
        if segment_pos is None:
            raise ValueError(
                "segment_pos=None; give the position of every token in its sequence, [b, s]"
            )
        ids, positions = _pair("segment_ids", segment_ids), _pair("segment_pos", segment_pos)
        for one, token_positions in zip(ids, positions, strict=True):
            if one.shape != token_positions.shape:
                raise ValueError(
                    f"segment_pos has shape {token_positions.shape}; segment_ids has {one.shape}, both must agree"
                )
        return cls(_empty(), _empty(), ids, positions)

    def check_segments(self, most: int) -> None:
        """Raise ValueError if a row is known to have more sequences than `most`; see `checks.is_known`."""
        for ids, lengths, offsets in zip(
            self.segment_ids, self.seqlens, self.seq_offsets, strict=True
        ):
            count, message = 0, "offsets put {} sequences into a row"
            if ids.size and is_known(ids):
                if (least := int(np.asarray(ids).min())) < 0:
                    raise ValueError(
                        f"segment_ids hold {least}; number sequences from 1, and give 0 for padding"
                    )
                count, message = int(np.asarray(ids).max()), "segment numbers go up to {}"
            elif offsets.size and is_known(lengths) and is_known(offsets):
                valid = (np.asarray(lengths) > 0) & (np.asarray(offsets)[:, :-1] >= 0)
                count = int(valid.sum(axis=1).max(initial=0))
            if count > most:
                raise ValueError(
                    f"max_segments_per_seq={most}, but the given {message.format(count)}; give "
                    f"max_segments_per_seq={count} or more"
                )

    def within(self, most: int) -> SequenceDescriptor:
        """Select the sequences 1 to `most` in every row, the only ones that kernels read, so that all backends agree.

        Only traced numbers can exceed `most` after `check_segments`.
        """
        if all(is_known(ids) for ids in self.segment_ids):
            return self
        numbers = tuple(jnp.where((ids < 0) | (ids > most), 0, ids) for ids in self.segment_ids)
        return replace(self, segment_ids=numbers)

    def check_lengths(self, queries: int, keys: int) -> None:
        """Raise ValueError if a sequence is known to exceed its row; see `checks.is_known`."""
        for lengths, offsets, tokens in zip(
            self.seqlens, self.seq_offsets, (queries, keys), strict=True
        ):
            if not lengths.size or not is_known(lengths) or not is_known(offsets):
                continue
            ends = np.asarray(lengths)
            if offsets.size:
                begins = np.asarray(offsets)[:, :-1]
                ends = np.where((begins >= 0) & (ends > 0), begins + ends, 0)
            elif (least := ends.min()) < 0:
                raise ValueError(
                    f"seqlens hold {least}, which is below 0; give 0 for a row without tokens"
                )
            if ends.max() > tokens:
                raise ValueError(
                    f"a sequence ends after token {ends.max()} of a row of {tokens}; give lengths and offsets within"
                )

    def segments(self, batch: int, queries: int, keys: int) -> Segments:
        """Sequences for b x q query tokens and b x k key tokens."""
        results = []
        for index, tokens in enumerate((queries, keys)):
            lengths, offsets, ids, positions = (
                part[index]
                for part in (self.seqlens, self.seq_offsets, self.segment_ids, self.segment_pos)
            )
            if ids.size:
                _check_shape("segment_ids", ids.shape, (batch, tokens))
                results.append((ids, positions))
                continue
            if offsets.size:
                _check_shape("seqlens", lengths.shape[:1], (batch,))
                results.append(_packed(lengths, offsets, tokens))
                continue
            _check_shape("seqlens", lengths.shape, (batch,))
            place_of = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (batch, tokens))
            results.append(((place_of < lengths[:, None]).astype(jnp.int32), place_of))
        return Segments(results[0][0], results[1][0], results[0][1], results[1][1])

    def get_seqlens_and_offsets(
        self,
        attn_mask_type: AttnMaskType,
        qkv_layout: QKVLayout,
        window_size: tuple[int, int] | None,
        max_segments_per_seq: int,
    ) -> tuple[Array, Array, Array, Array]:
        """Query and key lengths, then their offsets: the stored ones, or computed from segment numbers.

        For packed rows [b, n] and [b, n + 1], -1 for absent sequences; for others lengths [b], and no offsets. The mask
        type and the window do not change the lengths.
        """
        lengths, offsets = list(self.seqlens), list(self.seq_offsets)
        for index, ids in enumerate(self.segment_ids):
            if ids.size and qkv_layout.is_thd():
                lengths[index], offsets[index] = _absent_as_minus_one(
                    *_runs(ids, max_segments_per_seq)
                )
            elif ids.size:
                lengths[index] = (ids != 0).sum(axis=1, dtype=jnp.int32)
        return lengths[0], lengths[1], offsets[0], offsets[1]

    def limited_lengths(self, queries: int, keys: int) -> Pair:
        """Lengths, limited to their rows."""
        return _limit_lengths(self.seqlens[0], queries), _limit_lengths(self.seqlens[1], keys)

    def bounds(
        self, batch: int, queries: int, keys: int, most: int
    ) -> tuple[Array, Array, Array, Array]:
        """Query and key lengths, then their first tokens, int32 [b, n]; 0 for absent sequences.

        A sequence that only queries or only keys have gets the length 0 in the others: kernels use one number for both.

        Args:
            batch: Number of rows b.
            queries: Query tokens per row.
            keys: Key tokens per row.
            most: n if sequences are given by their numbers, whose tokens are adjacent.
        """
        pairs: list[Pair] = []
        for ids, lengths, offsets, tokens in zip(
            self.segment_ids, self.seqlens, self.seq_offsets, (queries, keys), strict=True
        ):
            if ids.size:
                _check_shape("segment_ids", ids.shape, (batch, tokens))
                pairs.append(_runs(ids, most))
            elif offsets.size:
                _check_shape("seqlens", lengths.shape[:1], (batch,))
                begins = offsets[:, :-1]
                lengths = _limit_lengths(lengths, tokens - begins)
                real = (begins >= 0) & (lengths > 0)
                pairs.append((jnp.where(real, lengths, 0), jnp.where(real, begins, 0)))
            else:
                _check_shape("seqlens", lengths.shape, (batch,))
                pairs.append(
                    (_limit_lengths(lengths, tokens)[:, None], jnp.zeros((batch, 1), jnp.int32))
                )
        count = max(lengths.shape[1] for lengths, _ in pairs)
        (lengths_q, starts_q), (lengths_kv, starts_kv) = (
            [
                (x if x.shape[1] == count else jnp.pad(x, ((0, 0), (0, count - x.shape[1]))))
                for x in pair
            ]
            for pair in pairs
        )
        return lengths_q, lengths_kv, starts_q, starts_kv


def _limit_lengths(lengths: Array, room: Array | int) -> Array:
    """Limit lengths to their row sizes: kernels read as many tokens as the lengths specify."""
    return jnp.clip(lengths, 0, jnp.maximum(room, 0))


def _absent_as_minus_one(lengths: Array, begins: Array) -> Pair:
    """Mark absent sequences with -1 in lengths [b, n] and offsets [b, n + 1]."""
    real = lengths > 0
    offsets = jnp.pad(jnp.where(real, begins, -1), ((0, 0), (0, 1)), constant_values=-1)
    return jnp.where(real, lengths, -1), offsets


def segments_at_most(descriptor: SequenceDescriptor | Array | None, most: int) -> int:
    """Maximum number of sequences in a packed row: the number of lengths, otherwise the caller's limit."""
    if isinstance(descriptor, SequenceDescriptor) and descriptor.seq_offsets[0].size:
        return max(lengths.shape[1] for lengths in descriptor.seqlens)
    return most


def _check_shape(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise ValueError(f"{name} has shape {shape}; these queries and keys need {expected}")


def _packed(lengths: Array, offsets: Array, tokens: int) -> Pair:
    """Compute segment numbers and token positions for rows with several sequences."""
    begins, token = offsets[:, :-1, None], jnp.arange(tokens, dtype=jnp.int32)
    inside = (
        (begins >= 0)
        & (lengths[:, :, None] > 0)
        & (token >= begins)
        & (token < begins + lengths[:, :, None])
    )
    numbers = jnp.arange(1, lengths.shape[1] + 1, dtype=jnp.int32)[:, None]
    ids = jnp.where(inside, numbers, 0).max(axis=1)
    places = jnp.where(inside, token - begins, 0).max(axis=1)
    return ids, places


def _runs(ids: Array, most: int) -> Pair:
    """Find lengths and first tokens [b, most] for the sequences numbered 1 to most."""
    inside = ids[:, None, :] == jnp.arange(1, most + 1, dtype=jnp.int32)[:, None]
    return inside.sum(axis=2, dtype=jnp.int32), jnp.argmax(inside, axis=2).astype(jnp.int32)
