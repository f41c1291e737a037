"""Lengths [b] and starts [b + 1] of the sequences in a batch, from padding masks, cu_seqlens or a cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common.checks import described
from ....common.formats import round_up
from ....common.numbers import with_article
from ...primitives.attention.mask import Mask
from ...primitives.attention.packed import cumulative, lengths_of_mask, sequence_lengths
from ...primitives.attention.sequence_rules import are_bounds
from ...runtime.device_checks import demand
from ..inference import CachedKeysValues, StepLimits
from .arguments import whole_length
from .settings import AttentionArguments, TensorFacts, is_pair, is_tensor

Pair = tuple[Tensor | None, Tensor | None]


class Side(NamedTuple):
    """Query sequences, or key and value sequences, as far as shapes determine them.

    Attributes:
        size: Longest sequence by the tensor or the caller; None if only the values of the lengths determine it.
        lengths: Length source: "bounds" (cu_seqlens), "mask", "queries" (equal to the queries'), "cache", None.
        starts: Start source in a packed tensor: "padded" (cu_seqlens_padded), "bounds", "lengths", None.
        masked: A mask tensor hides single tokens.
        tokens: Tokens in a packed tensor.
    """

    batch: int
    size: Any
    lengths: str | None = None
    starts: str | None = None
    masked: bool = False
    tokens: int | None = None


class Sequences(NamedTuple):
    """The sequences of a batch.

    Attributes:
        padded_between: There are tokens between sequences that belong to no sequence.
        arbitrary: A mask tensor hides single query-key pairs.
        bounded: Cumulative length values are read, and must delimit sequences in the tensors.
    """

    queries: Side
    keys: Side
    padded_between: bool = False
    arbitrary: bool = False
    bounded: bool = False


class SequenceTensors(NamedTuple):
    """Lengths, starts and masks for AttentionInputs."""

    lengths_q: Tensor | None = None
    lengths_kv: Tensor | None = None
    starts_q: Tensor | None = None
    starts_kv: Tensor | None = None
    masked_q: Tensor | None = None
    masked_kv: Tensor | None = None
    masked: Tensor | None = None


NO_TENSORS = SequenceTensors()


def parse_sequences(
    q: Any,
    k: Any,
    tensor_format: str,
    mask: Mask,
    attention_type: str,
    a: AttentionArguments,
    same: bool,
) -> Sequences:
    """Return the sequences that the arguments of an attention describe; arguments may be tensor descriptions.

    Args:
        same: Result from `are_same`.

    Raises:
        ValueError: The arguments contradict each other or the tensors.
    """
    packed, padding = tensor_format == "thd", mask.padding
    if packed and not mask.padding:
        raise ValueError(
            f"attn_mask_type={mask.name!r} with qkv_format='thd'; packed sequences need a padding mask, "
            f"for example 'padding_causal'"
        )
    if mask.arbitrary and not is_tensor(a.attention_mask):
        raise ValueError(
            "attn_mask_type='arbitrary' needs attention_mask, one tensor, True = masked out; "
            f"it is {described(a.attention_mask)}"
        )
    _check_masks(a.attention_mask)
    _, cu_q, cu_kv, starts_q, starts_kv = a[:5]
    if padding and cu_kv is starts_kv is None and attention_type == "self":
        cu_kv, starts_kv = cu_q, starts_q
    masked: Any = a.attention_mask if is_pair(a.attention_mask) else (a.attention_mask,) * 2
    if not padding or cu_q is not None:
        masked = (None, None)
    same = same and (cu_q is None) == (cu_kv is None) and (masked[0] is None) == (masked[1] is None)
    queries = _describe_side(
        "q", q, tensor_format, masked[0], cu_q, starts_q, a.max_seqlen_q, padding
    )
    keys = _describe_side(
        "kv", k, tensor_format, masked[1], cu_kv, starts_kv, a.max_seqlen_kv, padding
    )
    if same and queries.lengths is not None and keys.lengths is not None:
        keys = keys._replace(lengths="queries")
    if queries.batch != keys.batch:
        raise ValueError(
            f"queries have {queries.batch} sequences, keys {keys.batch}; they must agree"
        )
    pairs: Any = a.attention_mask
    arbitrary = mask.arbitrary and is_tensor(pairs)
    if arbitrary:
        shape = (queries.batch, q.shape[-2], queries.size, keys.size)
        fits = pairs.ndim <= 4 and all(
            size in (1, limit)
            for size, limit in zip(reversed(pairs.shape), reversed(shape), strict=False)
        )
        if not fits:
            raise ValueError(
                f"attention_mask {list(pairs.shape)} does not broadcast to {list(shape)}; "
                "give [b, h, s_q, s_kv] or 1s"
            )
    between = a.pad_between_seqs
    if between is None:
        between = packed and not (starts_q is None and starts_kv is None)
    return Sequences(queries, keys, between, arbitrary, padding or packed)


def are_same(a: AttentionArguments) -> bool:
    """Return whether query and key lengths, where both are given, are the same memory; masks count without lengths."""
    cu_q, cu_kv = a.cu_seqlens_q, a.cu_seqlens_kv
    if cu_q is not cu_kv and not (cu_q is None or cu_kv is None or _is_same_memory(cu_q, cu_kv)):
        return False
    mask: Any = a.attention_mask
    return (
        mask is None
        or cu_q is not None
        or not is_pair(mask)
        or len(mask) != 2
        or _is_same_memory(mask[0], mask[1])
    )


def sequence_tensors(s: Sequences, a: AttentionArguments) -> SequenceTensors:
    """Return the tensors for given sequences, whose lengths have been checked."""
    mask: Any = a.attention_mask
    if s.queries.lengths is None and s.keys.lengths is None:
        return SequenceTensors(masked=mask) if s.arbitrary else NO_TENSORS
    _, cu_q, cu_kv, starts_q, starts_kv = a[:5]
    mask_q, mask_kv = mask if type(mask) is tuple else (mask, mask)
    lengths_q = _lengths(s.queries, cu_q, mask_q)
    if s.keys.lengths == "queries":
        lengths_kv = lengths_q
        cu_kv, starts_kv = (cu_q, starts_q) if cu_kv is None else (cu_kv, starts_kv)
    else:
        lengths_kv = _lengths(s.keys, cu_kv, mask_kv)
    return SequenceTensors(
        lengths_q,
        lengths_kv,
        _starts(s.queries, cu_q, starts_q, lengths_q),
        _starts(s.keys, cu_kv, starts_kv, lengths_kv),
        mask_q if s.queries.masked else None,
        mask_kv if s.keys.masked else None,
    )


def demand_lengths(s: Sequences, a: AttentionArguments) -> None:
    """Check the length values that are read: they must fit sequences in the tensors.

    Not for a compiler, which has no values; torch 2.11 cannot trace the identity of None.
    """
    if not s.bounded:
        return
    _, cu_q, cu_kv, starts_q, starts_kv = a[:5]
    if cu_kv is None:
        cu_kv, starts_kv = cu_q, starts_q
    queries, keys = s.queries, s.keys
    if cu_q is not None:
        demand(are_bounds, (cu_q, starts_q), "cu_seqlens_q", queries.tokens, queries.size)
    self_attention = cu_kv is cu_q and starts_kv is starts_q
    if cu_kv is None or (
        self_attention and keys.tokens == queries.tokens and keys.size == queries.size
    ):
        return
    demand(are_bounds, (cu_kv, starts_kv), "cu_seqlens_kv", keys.tokens, keys.size)


class Cached(NamedTuple):
    """Metadata for the keys and values that a cache returns for a step.

    Attributes:
        longest: Most new tokens in a sequence.
        limits: Limits for the new keys and values; None if a custom manager has checked them.
    """

    key: TensorFacts
    value: TensorFacts
    tensor_format: str
    page_size: int
    batch: int
    longest: int
    max_seqlen_kv: int
    limits: StepLimits | None

    @classmethod
    def of(
        cls, cached: CachedKeysValues, limits: StepLimits | None, needs_longest: bool = False
    ) -> Cached:
        """Return the metadata; if needed, a length that the manager does not know is read from the device."""
        longest = cached.max_seqlen_q
        if needs_longest and not longest:
            longest = bucket_longest("q", cached_tensors(cached, True).lengths_q)
        k, v = cached.key, cached.value
        return cls(
            TensorFacts(k.shape, k.dtype, k.device, False),
            TensorFacts(v.shape, v.dtype, v.device, False),
            cached.qkv_format,
            cached.page_size,
            cached.cu_seqlens_q.shape[0] - 1,
            longest,
            cached.max_seqlen_kv,
            limits,
        )


def cached_sequences(q: Any, q_format: str, max_seqlen_q: int | None, cached: Cached) -> Sequences:
    """Return the sequences for a step's queries and all cached keys."""
    if q_format == "thd":
        given = whole_length("q", max_seqlen_q)
        if given and given < cached.longest:
            raise ValueError(
                f"max_seqlen_q={given}, a sequence of the step brings {cached.longest} tokens; leave it out"
            )
        longest = given or cached.longest
    else:
        batch, longest = _extents(q, q_format)
        if batch != cached.batch:
            raise ValueError(
                f"queries have {batch} sequences, the step {cached.batch}; they must agree"
            )
    tokens = q.shape[0] if q_format == "thd" else None
    return Sequences(
        Side(cached.batch, longest, "cache", tokens=tokens),
        Side(cached.batch, cached.max_seqlen_kv, "cache"),
    )


def cached_tensors(cached: CachedKeysValues, packed: bool) -> SequenceTensors:
    """Return the lengths of a step, and the starts of its packed queries."""
    return SequenceTensors(
        sequence_lengths(cached.cu_seqlens_q) if cached.lengths_q is None else cached.lengths_q,
        sequence_lengths(cached.cu_seqlens_kv) if cached.lengths_kv is None else cached.lengths_kv,
        cached.cu_seqlens_q if packed else None,
    )


def unknown_sequences(q: Any, q_format: str) -> Sequences:
    """Return provisional sequences, as long as the queries, of a step that only a custom cache manager can describe."""
    batch, size = (1, q.shape[0]) if q_format == "thd" else _extents(q, q_format)
    return Sequences(Side(batch, size), Side(batch, size))


def _extents(x: Any, tensor_format: str) -> tuple[int, int]:
    """Return (sequences, tokens per sequence) for an unpacked tensor."""
    return (x.shape[1], x.shape[0]) if tensor_format == "sbhd" else (x.shape[0], x.shape[1])


def _describe_side(
    name: str,
    x: Any,
    tensor_format: str,
    masked: Any,
    cu_seqlens: Any,
    starts: Any,
    max_seqlen: int | None,
    padding: bool,
) -> Side:
    """Return the query sequences, or the key and value sequences."""
    for bounds in (cu_seqlens, starts):
        if bounds is not None:
            _check_cumulative(name, bounds, x)
    if starts is not None and (cu_seqlens is None or starts.shape != cu_seqlens.shape):
        shape = None if cu_seqlens is None else list(cu_seqlens.shape)
        raise ValueError(
            f"cu_seqlens_{name}_padded is {list(starts.shape)}, cu_seqlens_{name} {shape}; give both, equally long"
        )
    max_seqlen = whole_length(name, max_seqlen)
    if padding and cu_seqlens is None and masked is None:
        raise ValueError(
            f"a padding mask needs cu_seqlens_{name}, or attention_mask [b, 1, 1, s] (a pair for cross), "
            "and both are None"
        )
    source = "mask" if cu_seqlens is None else "bounds"
    if tensor_format == "thd":
        batch = masked.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        begin = "lengths" if cu_seqlens is None else "bounds"
        begin = begin if starts is None else "padded"
        return Side(batch, max_seqlen, source, begin, tokens=x.shape[0])
    batch, size = _extents(x, tensor_format)
    if masked is not None and (masked.numel() != batch * size or masked.shape[-1] != size):
        raise ValueError(
            f"attention_mask of {name} is {list(masked.shape)}, a padding mask is {[batch, 1, 1, size]}; "
            'give a pair of masks for cross attention, or use attn_mask_type="arbitrary"'
        )
    if not padding and cu_seqlens is None:
        return Side(batch, size)
    sequences = masked.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1  # pyright: ignore[reportOptionalMemberAccess]
    if sequences != batch:
        raise ValueError(
            f"cu_seqlens_{name} has {sequences} sequences, the tensor {batch}; give 0 and where each of them ends, or "
            "qkv_format='thd' with a padding mask, where a row holds several"
        )
    return Side(batch, size, source, None, masked is not None) if padding else Side(batch, size)


def _check_cumulative(name: str, bounds: Any, x: Tensor) -> None:
    if not is_tensor(bounds):
        raise ValueError(
            f"cu_seqlens_{name} is {with_article(type(bounds))}; give an int32 tensor [b + 1]"
        )
    if bounds.dtype != torch.int32:
        raise ValueError(f"cu_seqlens_{name} is {bounds.dtype}; it must be torch.int32, convert it")
    if bounds.ndim != 1 or bounds.shape[0] < 1:
        raise ValueError(
            f"cu_seqlens_{name} is {list(bounds.shape)}; give [b + 1], 0 and where each sequence ends"
        )
    if bounds.shape[0] == 1 and x.numel():
        raise ValueError(
            f"cu_seqlens_{name} is [1], which describes no sequence, the tensor {list(x.shape)}; add the end of each"
        )
    if bounds.device != x.device:
        raise ValueError(
            f"cu_seqlens_{name} is on {bounds.device}, the tensor on {x.device}; move it there"
        )


def _lengths(side: Side, cu_seqlens: Tensor | None, masked: Tensor | None) -> Tensor | None:
    if side.lengths == "bounds":
        assert cu_seqlens is not None
        return sequence_lengths(cu_seqlens)
    if side.lengths is None:
        return None
    assert masked is not None
    return lengths_of_mask(masked)


def _starts(
    side: Side, cu_seqlens: Tensor | None, padded: Tensor | None, lengths: Tensor | None
) -> Tensor | None:
    if side.starts == "bounds":
        return cu_seqlens
    if side.starts is None:
        return None
    if side.starts == "padded":
        return padded
    assert lengths is not None
    return cumulative(lengths)


def _is_same_memory(a: Any, b: Any) -> bool:
    """Return whether two tensors are the same memory; values are not compared."""
    if a is b:
        return True
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or torch.compiler.is_compiling():
        return False
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def bucket_longest(name: str, lengths: Tensor | None) -> int:
    """Return the longest sequence, rounded up so that batches share shapes; this waits for the device."""
    if torch.compiler.is_compiling():
        raise ValueError(
            f"max_seqlen_{name} is needed under torch.compile with qkv_format='thd'; pass it"
        )
    assert lengths is not None
    return round_up(int(lengths.max()), 64) if lengths.numel() else 0


def _check_masks(attention_mask: Any) -> None:
    """Raise ValueError unless a mask is None, a bool tensor or two bool tensors."""
    if attention_mask is None:
        return
    masks = attention_mask if is_pair(attention_mask) else (attention_mask,)
    if is_pair(attention_mask) and len(masks) != 2:
        raise ValueError(
            f"attention_mask has {len(masks)} parts; give one tensor, or a pair for queries and keys"
        )
    for masked in masks:
        if masked is not None and not (is_tensor(masked) and masked.dtype == torch.bool):
            kind = masked.dtype if is_tensor(masked) else type(masked).__name__
            raise ValueError(f"attention_mask is {kind}; give bool tensors, True = masked out")
