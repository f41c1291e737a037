"""call = prepared(layer, q, k, v, arguments): what an attention is called with, checked and in order.

All that a call can be refused for, its backend apart, is found here, before anything is changed. It works on
descriptions of q, k and v too, so that a layer has its core attention's arguments checked ahead of its projections.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...primitives.attention import mask as masks
from ...primitives.attention.alibi import default_slopes
from ...primitives.attention.request import QKV_FORMATS, AttentionInputs
from ..inference import CachedKeysValues, InferenceParams
from .arguments import check_cache, check_kinds, check_slopes, check_tensors, one_of, sink_of
from .call import Prepared, Settings
from .sequences import Sequences, cached_sequences, given_sequences, unknown_sequences
from .settings import CallArguments, Config, Described


def prepared(
    config: Config, offset: Tensor | None, q: Any, k: Any, v: Any, a: CallArguments, only_shapes: bool = False
) -> tuple[Prepared, bool]:
    """The call, and whether a cache has taken the keys already: one of a custom manager is written to be seen.

    offset        the layer's learnable softmax_offset
    only_shapes   q, k and v are Described; no cache is written
    """
    check_kinds(a)
    q_format = kv_format = config.qkv_format if a.qkv_format is None else a.qkv_format
    one_of("qkv_format", q_format, QKV_FORMATS)
    check_tensors(q, k, v, q_format, config.heads, config.groups, config.head_dim_qk, config.head_dim_v)
    mask = _mask(config, a, q.dtype)
    slopes = _slopes(config, a.bias_type, q, a.alibi_slopes)
    cached, written = _cached(config, k, v, q_format, a.inference_params, only_shapes)
    page_size, page_table = 0, None
    if cached is not None:
        k, v, kv_format = cached.key, cached.value, cached.qkv_format
        page_size, page_table = cached.page_size, cached.page_table
        sequences = cached_sequences(q, q_format, a.max_seqlens[0], cached)
    elif a.inference_params is not None:
        sequences = unknown_sequences(q, q_format)
    else:
        sequences = _given(config, q, k, q_format, mask, a)
    settings = Settings(
        mask,
        q_format,
        kv_format,
        a.bias_type,
        config.softmax_type,
        config.softmax_scale,
        config.dropout if config.training else 0.0,
        config.max_logit,
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
        sink=sink_of(config.softmax_type, offset, config.heads, q.device),
        page_table=page_table,
    )
    return Prepared(settings, sequences, inputs, a.alibi_slopes is not None), written


def _mask(config: Config, a: CallArguments, dtype: torch.dtype) -> masks.Mask:
    """What the names and windows of the call, else of the layer, mean together."""
    name = config.attn_mask_type if a.attn_mask_type is None else masks.canonical_name(a.attn_mask_type)
    if a.inference_params is not None:
        check_cache(config.layer_number, a.inference_params.dtype, dtype)
        name = masks.over_cached_keys(name)
    return masks.resolved(
        name,
        config.window if a.window_size is None else a.window_size,
        config.bottom_right_diagonal if a.bottom_right_diagonal is None else a.bottom_right_diagonal,
    )


def _cached(
    config: Config, k: Any, v: Any, q_format: str, cache: InferenceParams | None, only_shapes: bool
) -> tuple[CachedKeysValues | None, bool]:
    """All keys and values of a step, and whether the new ones are written."""
    if cache is None:
        return None, False
    assert config.layer_number is not None
    cached = cache.upcoming(config.layer_number, k, v, q_format)
    if cached is not None or only_shapes:
        return cached, False
    return cache.step(config.layer_number, k, v, q_format), True


def _given(
    config: Config, q: Any, k: Any, tensor_format: str, mask: masks.Mask, a: CallArguments
) -> Sequences:
    return given_sequences(
        q,
        k,
        tensor_format,
        tensor_format,
        mask,
        config.attention_type,
        a.attention_mask,
        a.cu_seqlens,
        a.cu_seqlens_padded,
        a.max_seqlens,
        a.pad_between_seqs,
    )


def _slopes(config: Config, bias_type: str, q: Tensor | Described, given: Tensor | None) -> Tensor | None:
    """ALiBi's slopes of this rank's heads, as given or the usual ones."""
    if given is not None:
        return check_slopes(given, bias_type, q, config.heads)
    if bias_type != "alibi":
        return None
    rank = torch.distributed.get_rank(config.tp_group) if config.tp_group is not None else 0
    slopes = default_slopes(config.all_heads, q.device)
    return slopes[rank * config.heads : (rank + 1) * config.heads]
