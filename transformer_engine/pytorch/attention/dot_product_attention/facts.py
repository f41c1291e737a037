"""facts = facts_of(arguments), and arguments = described_arguments(facts): what a call is given, as a part of a key."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .settings import CallArguments, Described, described_of


def facts_of(a: CallArguments) -> tuple[Any, ...]:
    """The arguments as a part of a key, in their order: of tensors what a Described has, of a cache that there is one.

    TypeError for what should be a tensor and is none, such as an array of another library.
    """
    (cu_q, cu_kv), (starts_q, starts_kv) = a.cu_seqlens, a.cu_seqlens_padded
    mask = a.attention_mask
    parts = mask if type(mask) is tuple else (mask,)
    for x in (cu_q, cu_kv, starts_q, starts_kv, *parts):
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(f"{type(x).__name__} is no tensor")
    return (
        None if mask is None else _mask_facts(mask),
        a.qkv_format,
        (
            None if cu_q is None else (cu_q.shape, cu_q.dtype, cu_q.device, False),
            None if cu_kv is None else (cu_kv.shape, cu_kv.dtype, cu_kv.device, False),
        ),
        (
            None if starts_q is None else (starts_q.shape, starts_q.dtype, starts_q.device, False),
            None if starts_kv is None else (starts_kv.shape, starts_kv.dtype, starts_kv.device, False),
        ),
        a.max_seqlens,
        a.attn_mask_type,
        a.window_size,
        a.bottom_right_diagonal,
        a.bias_type,
        None if a.bias is None else tuple(described_of(a.bias)),
        None if a.alibi_slopes is None else tuple(described_of(a.alibi_slopes)),
        None if a.inference_params is None else True,
        a.pad_between_seqs,
        a.num_splits,
        a.score_mod,
    )


def _mask_facts(mask: Any) -> tuple[Any, ...]:
    """Of one mask, or of a tuple of them, which may be the same."""
    if type(mask) is not tuple:
        return ((mask.shape, mask.dtype, mask.device, False),)
    facts = [None if part is None else (part.shape, part.dtype, part.device, False) for part in mask]
    return (*facts, "each")


def described_arguments(facts: tuple[Any, ...]) -> CallArguments:
    """The arguments of facts, with descriptions for tensors."""
    a = CallArguments(*facts)
    mask: Any = a.attention_mask
    if mask is not None:
        parts = tuple(map(_described, mask[: max(1, len(mask) - 1)]))
        mask = parts if mask[-1] == "each" else parts[0]
    return a._replace(
        attention_mask=mask,
        cu_seqlens=tuple(map(_described, a.cu_seqlens)),
        cu_seqlens_padded=tuple(map(_described, a.cu_seqlens_padded)),
        bias=_described(a.bias),
        alibi_slopes=_described(a.alibi_slopes),
    )


def _described(facts: Any) -> Any:
    return None if facts is None else Described(*facts)
