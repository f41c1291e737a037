"""lengths [b] and starts [b + 1] of the sequences of a batch, from padding masks or cu_seqlens."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....common.checks import described
from ....common.formats import round_up
from ...primitives.attention.mask import Mask
from ...primitives.attention.packed import cumulative, lengths_of, lengths_of_mask
from ...primitives.attention.sequence_rules import are_bounds
from ...runtime.device_checks import demand
from ..inference import CachedKeysValues

Pair = tuple[Tensor | None, Tensor | None]


class Sequences(NamedTuple):
    """Lengths, starts and masks of a batch's queries and keys, as AttentionInputs has them."""

    batch: int
    max_q: int
    max_kv: int
    padded_between: bool
    lengths_q: Tensor | None
    lengths_kv: Tensor | None
    starts_q: Tensor | None
    starts_kv: Tensor | None
    masked_q: Tensor | None
    masked_kv: Tensor | None
    masked: Tensor | None


def given_sequences(
    q: Tensor,
    k: Tensor,
    q_format: str,
    kv_format: str,
    mask: Mask,
    attention_type: str,
    attention_mask: Tensor | tuple[Tensor, Tensor] | None,
    cu_seqlens: Pair,
    cu_seqlens_padded: Pair,
    max_seqlens: tuple[int | None, int | None],
    pad_between_seqs: bool | None,
) -> Sequences:
    """The sequences that the arguments of an attention describe; ValueError when they do not agree.

    Lengths on a GPU are trusted unless TE_CHECK=1 asks for them, see `device_checks`.
    """
    _check_mask_is_used(mask, attention_mask, "thd" in (q_format, kv_format))
    _check_masks(attention_mask)
    (cu_q, cu_kv), (starts_q, starts_kv), (max_q, max_kv) = cu_seqlens, cu_seqlens_padded, max_seqlens
    if mask.padding and cu_kv is None and attention_type == "self":
        cu_kv, starts_kv = cu_q, starts_q
    masked = attention_mask if isinstance(attention_mask, tuple) else (attention_mask, attention_mask)
    if not mask.padding or cu_q is not None:
        masked = (None, None)
    queries = _side("q", q, q_format, masked[0], cu_q, starts_q, max_q, mask.padding)
    same = _same(cu_q, cu_kv) and _same(masked[0], masked[1])
    known = queries.lengths if same else None
    keys = _side("kv", k, kv_format, masked[1], cu_kv, starts_kv, max_kv, mask.padding, known)
    if queries.batch != keys.batch:
        raise ValueError(f"queries have {queries.batch} sequences, keys {keys.batch}; they must agree")
    arbitrary = attention_mask if mask.arbitrary and isinstance(attention_mask, Tensor) else None
    if arbitrary is not None:
        _check_broadcasts(arbitrary, (queries.batch, q.shape[-2], queries.size, keys.size))
    if mask.padding or "thd" in (q_format, kv_format):
        sides = (cu_q, cu_kv), (starts_q, starts_kv), (queries.size, keys.size)
        _demand_bounds((q, k), (q_format, kv_format), *sides)
    if pad_between_seqs is None:
        pad_between_seqs = q_format == "thd" and not (starts_q is None and starts_kv is None)
    return Sequences(
        batch=queries.batch,
        max_q=queries.size,
        max_kv=keys.size,
        padded_between=pad_between_seqs,
        lengths_q=queries.lengths,
        lengths_kv=keys.lengths,
        starts_q=queries.starts,
        starts_kv=keys.starts,
        masked_q=queries.masked,
        masked_kv=keys.masked,
        masked=arbitrary,
    )


def demand_lengths(
    qk: tuple[Any, Any],
    tensor_format: str,
    cu_seqlens: Pair,
    cu_seqlens_padded: Pair,
    max_seqlens: tuple[Any, Any],
) -> None:
    """The numbers in the lengths of a call whose shapes are known to be right; qk need shapes only."""
    (cu_q, cu_kv), (starts_q, starts_kv) = cu_seqlens, cu_seqlens_padded
    if cu_kv is None:
        cu_kv, starts_kv = cu_q, starts_q
    packed = tensor_format == "thd"
    sizes = [x.shape[0 if packed else tensor_format.index("s")] for x in qk]
    if packed:
        sizes = [size if most is None else most for size, most in zip(sizes, max_seqlens, strict=True)]
    starts = starts_q, starts_kv
    _demand_bounds(qk, (tensor_format, tensor_format), (cu_q, cu_kv), starts, (sizes[0], sizes[1]))


def _demand_bounds(
    qk: tuple[Any, Any], formats: tuple[str, str], cu_seqlens: Pair, starts: Pair, sizes: tuple[int, int]
) -> None:
    """are_bounds of queries and keys, once where they are the same."""
    if torch.compiler.is_compiling():
        return  # nothing would be demanded, and torch 2.11 cannot trace the identity of None
    known = None
    for name, x, tensor_format, bounds, begins, size in zip(
        ("cu_seqlens_q", "cu_seqlens_kv"), qk, formats, cu_seqlens, starts, sizes, strict=True
    ):
        tokens = x.shape[0] if tensor_format == "thd" else None
        facts = (id(bounds), id(begins), tokens, size)
        if bounds is not None and facts != known:
            demand(are_bounds, (bounds, begins), name, tokens, size)
        known = facts


def cached_sequences(
    q: Tensor, q_format: str, max_seqlen_q: int | None, cached: CachedKeysValues
) -> Sequences:
    """The sequences of a step's queries and of all cached keys."""
    lengths_q = lengths_of(cached.cu_seqlens_q) if cached.lengths_q is None else cached.lengths_q
    lengths_kv = lengths_of(cached.cu_seqlens_kv) if cached.lengths_kv is None else cached.lengths_kv
    if q_format == "thd":
        given = _whole("max_seqlen_q", max_seqlen_q)
        if given and given < cached.max_seqlen_q:
            raise ValueError(
                f"max_seqlen_q={given}, a sequence of the step brings {cached.max_seqlen_q} tokens; leave it out"
            )
        longest = given or cached.max_seqlen_q or _longest("q", lengths_q)
    else:
        longest = q.shape[0] if q_format == "sbhd" else q.shape[1]
    starts = cached.cu_seqlens_q if q_format == "thd" else None
    batch = lengths_q.shape[0]
    if q_format != "thd" and batch != q.shape[q_format.index("b")]:
        raise ValueError(
            f"queries have {q.shape[q_format.index('b')]} sequences, the step {batch}; they must agree"
        )
    return Sequences(
        batch, longest, cached.max_seqlen_kv, False, lengths_q, lengths_kv, starts, None, None, None, None
    )


def unknown_sequences(q: Any, q_format: str) -> Sequences:
    """Those of a step that only a custom cache manager can describe: as long as the queries, for a check."""
    batch, size = (
        (1, q.shape[0]) if q_format == "thd" else (q.shape[q_format.index("b")], q.shape[q_format.index("s")])
    )
    nothing = (None,) * 7
    return Sequences(batch, size, size, False, *nothing)


class _Side(NamedTuple):
    batch: int
    size: int
    lengths: Tensor | None = None
    starts: Tensor | None = None
    masked: Tensor | None = None


def _side(
    name: str,
    x: Tensor,
    tensor_format: str,
    masked: Tensor | None,
    cu_seqlens: Tensor | None,
    starts: Tensor | None,
    max_seqlen: int | None,
    padding: bool,
    lengths: Tensor | None = None,
) -> _Side:
    """The sequences of the queries, or those of the keys and values; lengths: what they are, where known."""
    for tensor in (cu_seqlens, starts):
        if tensor is not None:
            _check_cumulative(name, tensor, x)
    if starts is not None and (cu_seqlens is None or starts.shape != cu_seqlens.shape):
        given = None if cu_seqlens is None else list(cu_seqlens.shape)
        raise ValueError(
            f"cu_seqlens_{name}_padded is {list(starts.shape)}, cu_seqlens_{name} {given}; give both, equally long"
        )
    max_seqlen = _whole(f"max_seqlen_{name}", max_seqlen)
    if padding and cu_seqlens is None and masked is None:
        raise ValueError(
            f"a padding mask needs cu_seqlens_{name}, or attention_mask [b, 1, 1, s] (a pair for cross), "
            "and both are None"
        )
    if tensor_format != "thd":
        size, batch = (x.shape[0], x.shape[1]) if tensor_format == "sbhd" else (x.shape[1], x.shape[0])
        if masked is not None and (masked.numel() != batch * size or masked.shape[-1] != size):
            raise ValueError(
                f"attention_mask of {name} is {list(masked.shape)}, a padding mask is {[batch, 1, 1, size]}; "
                'give a pair of masks for cross attention, or use attn_mask_type="arbitrary"'
            )
        if not padding:
            return _Side(batch, size)
        if lengths is None:
            lengths = _lengths(cu_seqlens, masked)
        if lengths.shape[0] != batch:
            raise ValueError(
                f"cu_seqlens_{name} has {lengths.shape[0]} sequences, the tensor {batch}; "
                "give 0 and where each of them ends"
            )
        return _Side(batch, size, lengths, None, masked)
    if lengths is None:
        lengths = _lengths(cu_seqlens, masked)
    if starts is None:
        starts = cumulative(lengths) if cu_seqlens is None else cu_seqlens
    if max_seqlen is None:
        max_seqlen = _longest(name, lengths)
    return _Side(lengths.shape[0], max_seqlen, lengths, starts)


def _check_cumulative(name: str, bounds: Any, x: Tensor) -> None:
    if not isinstance(bounds, Tensor):
        raise ValueError(f"cu_seqlens_{name} is a {type(bounds).__name__}; give an int32 tensor [b + 1]")
    if bounds.dtype != torch.int32:
        raise ValueError(f"cu_seqlens_{name} is {bounds.dtype}; it must be torch.int32, convert it")
    if bounds.ndim != 1 or bounds.shape[0] < 1:
        raise ValueError(
            f"cu_seqlens_{name} is {list(bounds.shape)}; give [b + 1], 0 and where each sequence ends"
        )
    if bounds.shape[0] == 1 and x.numel():
        raise ValueError(
            f"cu_seqlens_{name} is [1], which is no sequence, the tensor {list(x.shape)}; add where each sequence ends"
        )
    if bounds.device != x.device:
        raise ValueError(f"cu_seqlens_{name} is on {bounds.device}, the tensor on {x.device}; move it there")


def _whole(name: str, size: Any) -> int | None:
    """size as an int >= 0; integers of other libraries are taken, too."""
    if size is None or torch.compiler.is_compiling():
        return size
    try:
        if isinstance(size, bool):
            raise TypeError
        whole = operator.index(size)
    except TypeError:
        raise ValueError(
            f"{name}={size!r} is no whole number; give the tokens of the longest sequence"
        ) from None
    if whole < 0:
        raise ValueError(f"{name}={whole} is below 0; give the tokens of the longest sequence")
    return whole


def _lengths(cu_seqlens: Tensor | None, masked: Tensor | None) -> Tensor:
    if cu_seqlens is not None:
        return lengths_of(cu_seqlens)
    assert masked is not None
    return lengths_of_mask(masked)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    """Are they the same numbers in memory? Two tensors that hold equal numbers are not compared."""
    if a is b:
        return True
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or torch.compiler.is_compiling():
        return False
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _longest(name: str, lengths: Tensor) -> int:
    """The longest sequence, rounded up so that batches share shapes; this waits for the device."""
    if torch.compiler.is_compiling():
        raise ValueError(f"max_seqlen_{name} is needed under torch.compile with qkv_format='thd'; pass it")
    return round_up(int(lengths.max()), 64) if lengths.numel() else 0


def _check_masks(attention_mask: Any) -> None:
    """ValueError unless it is None, a bool tensor or a pair of them."""
    if attention_mask is None:
        return
    masks = attention_mask if isinstance(attention_mask, tuple) else (attention_mask,)
    if isinstance(attention_mask, tuple) and len(masks) != 2:
        raise ValueError(
            f"attention_mask has {len(masks)} parts; give one tensor, or a pair for queries and keys"
        )
    for masked in masks:
        if masked is not None and not (isinstance(masked, Tensor) and masked.dtype == torch.bool):
            kind = masked.dtype if isinstance(masked, Tensor) else type(masked).__name__
            raise ValueError(f"attention_mask is {kind}; give bool tensors, True = masked out")


def _check_broadcasts(masked: Tensor, shape: tuple[int, ...]) -> None:
    fits = masked.ndim <= 4 and all(
        size in (1, limit) for size, limit in zip(reversed(masked.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise ValueError(
            f"attention_mask {list(masked.shape)} does not broadcast to {list(shape)}; give [b, h, s_q, s_kv] or 1s"
        )


def _check_mask_is_used(mask: Mask, attention_mask: object, packed: bool) -> None:
    if packed and not mask.padding:
        raise ValueError(
            f"attn_mask_type={mask.name!r} with qkv_format='thd'; packed sequences need a padding mask, "
            f"for example 'padding_causal'"
        )
    if mask.arbitrary and not isinstance(attention_mask, Tensor):
        raise ValueError(
            "attn_mask_type='arbitrary' needs attention_mask, one tensor, True = masked out; "
            f"it is {described(attention_mask)}"
        )
