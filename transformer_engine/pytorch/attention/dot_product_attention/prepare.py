"""call = prepared(layer, q, k, v, arguments): what an attention is called with, checked and in order.

All that a call can be refused for, its backend apart, is found here, before anything is changed. It works on
descriptions of q, k and v too, so that a layer has its core attention's arguments checked ahead of its projections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...tracing import number_while_tracing
from . import mask as masks
from .alibi import default_slopes
from .arguments import check_cache, check_tensors, one_of, sink_of
from .call import Described, Options, Prepared
from .request import BIAS_TYPES, QKV_FORMATS, AttentionInputs
from .sequences import Sequences, cached_sequences, given_sequences, unknown_sequences

if TYPE_CHECKING:
    from ..inference import CachedKeysValues, InferenceParams
    from .dot_product_attention import DotProductAttention


class CallArguments(NamedTuple):
    """The arguments of DotProductAttention.forward that say what is attended to; pairs are of queries and keys."""

    attention_mask: Tensor | tuple[Tensor, Tensor] | None
    qkv_format: str | None
    cu_seqlens: tuple[Tensor | None, Tensor | None]
    cu_seqlens_padded: tuple[Tensor | None, Tensor | None]
    max_seqlens: tuple[int | None, int | None]
    attn_mask_type: str | None
    window_size: tuple[int, int] | None
    bottom_right_diagonal: bool | None
    bias_type: str
    bias: Tensor | None
    alibi_slopes: Tensor | None
    inference_params: InferenceParams | None
    pad_between_seqs: bool | None
    num_splits: int | None = 1
    score_mod: Callable[..., Tensor] | None = None


def prepared(
    layer: DotProductAttention, q: Any, k: Any, v: Any, a: CallArguments, only_shapes: bool = False
) -> tuple[Prepared, bool]:
    """The call, and whether a cache has taken the keys already: one of a custom manager is written to be seen.

    only_shapes   q, k and v are Described; no cache is written
    """
    q_format = kv_format = layer.qkv_format if a.qkv_format is None else a.qkv_format
    one_of("qkv_format", q_format, QKV_FORMATS)
    groups = layer.num_gqa_groups_per_partition
    check_tensors(q, k, v, q_format, layer.heads, groups, layer.head_dim_qk, layer.head_dim_v)
    mask = _mask(layer, a, q.dtype)
    one_of("core_attention_bias_type", a.bias_type, BIAS_TYPES)
    slopes = _slopes(layer, a.bias_type, q, a.alibi_slopes)
    cached, written = _cached(layer, k, v, q_format, a.inference_params, only_shapes)
    page_size, page_table = 0, None
    if cached is not None:
        k, v, kv_format = cached.key, cached.value, cached.qkv_format
        page_size, page_table = cached.page_size, cached.page_table
        sequences = cached_sequences(q, q_format, a.max_seqlens[0], cached)
    elif a.inference_params is not None:
        sequences = unknown_sequences(q, q_format)
    else:
        sequences = _given(layer, q, k, q_format, mask, a)
    scale, dropout = layer.softmax_scale, layer.attention_dropout
    if torch.compiler.is_compiling():
        scale = number_while_tracing(layer._softmax_scale_text)
        dropout = number_while_tracing(layer._attention_dropout_text)
    options = Options(
        mask,
        q_format,
        kv_format,
        a.bias_type,
        layer.softmax_type,
        scale,
        dropout if layer.training else 0.0,
        layer.return_max_logit,
        page_size,
        0 if a.num_splits is None else a.num_splits,
        a.inference_params is not None,
        a.score_mod,
    )
    if not only_shapes:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    inputs = AttentionInputs(
        q,
        k,
        v,
        *sequences[4:],
        bias=a.bias,
        slopes=slopes,
        sink=sink_of(layer.softmax_type, layer.softmax_offset, layer.heads, q.device),
        page_table=page_table,
    )
    return Prepared(options, sequences, inputs, a.alibi_slopes is not None), written


def _mask(layer: DotProductAttention, a: CallArguments, dtype: torch.dtype) -> masks.Mask:
    """What the names and windows of the call, else of the layer, mean together."""
    name = layer.attn_mask_type if a.attn_mask_type is None else masks.canonical_name(a.attn_mask_type)
    if a.inference_params is not None:
        check_cache(layer.layer_number, a.inference_params.dtype, dtype)
        name = masks.over_cached_keys(name)
    return layer._resolved_mask(
        name,
        layer._given_window if a.window_size is None else a.window_size,
        layer.bottom_right_diagonal if a.bottom_right_diagonal is None else a.bottom_right_diagonal,
    )


def _cached(
    layer: DotProductAttention,
    k: Any,
    v: Any,
    q_format: str,
    cache: InferenceParams | None,
    only_shapes: bool,
) -> tuple[CachedKeysValues | None, bool]:
    """All keys and values of a step, and whether the new ones are written."""
    if cache is None:
        return None, False
    assert layer.layer_number is not None
    cached = cache.upcoming(layer.layer_number, k, v, q_format)
    if cached is not None or only_shapes:
        return cached, False
    return cache.step(layer.layer_number, k, v, q_format), True


def _given(
    layer: DotProductAttention, q: Any, k: Any, tensor_format: str, mask: masks.Mask, a: CallArguments
) -> Sequences:
    return given_sequences(
        q,
        k,
        tensor_format,
        tensor_format,
        mask,
        layer.attention_type,
        a.attention_mask,
        a.cu_seqlens,
        a.cu_seqlens_padded,
        a.max_seqlens,
        a.pad_between_seqs,
    )


def _slopes(
    layer: DotProductAttention, bias_type: str, q: Tensor | Described, given: Tensor | None
) -> Tensor | None:
    """ALiBi's slopes of this rank's heads, as given or the usual ones."""
    if bias_type != "alibi":
        if given is not None:
            raise ValueError(f'alibi_slopes with core_attention_bias_type={bias_type!r}; it must be "alibi"')
        return None
    if given is not None:
        if given.shape[-1] != layer.heads:
            raise ValueError(f"alibi_slopes {list(given.shape)} does not end in {layer.heads} heads")
        return given
    rank = torch.distributed.get_rank(layer.tp_group) if layer.tp_group is not None else 0
    slopes = default_slopes(layer.num_attention_heads, q.device)
    return slopes[rank * layer.heads : (rank + 1) * layer.heads]
