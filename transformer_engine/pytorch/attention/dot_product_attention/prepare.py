"""request, sequences = judged(config, q, k, v, arguments, ..): what a call of an attention asks for, after every check.

All that a call can be refused for, its backend and the numbers in its tensors apart, is found here, from shapes, names
and modes: tensors may be descriptions, so that what is found is remembered, and an attention layer has its core's
arguments judged ahead of its projections.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ....common import env
from ...primitives.attention import mask as masks
from ...primitives.attention.request import (
    QKV_FORMATS,
    AttentionRequest,
    Device,
    Options,
    Shape,
    Switches,
)
from ...runtime.device import get_device_compute_capability
from .arguments import check_bias, check_cache, check_tensors, one_of
from .sequences import Cached, Sequences, cached_sequences, given_sequences, unknown_sequences
from .settings import AttentionConfig, CallArguments, Numbers


class Modes(NamedTuple):
    """What is in force round a call. gradient: is one wanted; deterministic: torch's own switch."""

    gradient: bool
    deterministic: bool


def sequences_of(
    config: AttentionConfig, qkv: tuple[Any, Any, Any], a: CallArguments, cached: Cached | None, same: bool
) -> tuple[masks.Mask, Sequences]:
    """The mask of a call and its sequences, of tensors that fit the layer; ValueError or TypeError if they do not.

    cached   what a cache gives the step; None beside inference_params: only its custom manager knows
    same     `sequences.are_same` of the arguments
    """
    q, k, v = qkv
    tensor_format = config.qkv_format if a.qkv_format is None else a.qkv_format
    one_of("qkv_format", tensor_format, QKV_FORMATS)
    check_tensors(q, k, v, tensor_format, config)
    mask = _mask(config, a)
    if cached is not None:
        if cached.limits is not None:
            check_cache(config.layer_number, cached.limits.dtype, q.dtype)
            cached.limits.check(k, v, tensor_format)
        return mask, cached_sequences(q, tensor_format, a.max_seqlens[0], cached)
    if a.inference_params is not None:
        return mask, unknown_sequences(q, tensor_format)
    return mask, given_sequences(q, k, tensor_format, mask, config.attention_type, a, same)


def judged(
    config: AttentionConfig,
    numbers: Numbers,
    qkv: tuple[Any, Any, Any],
    a: CallArguments,
    modes: Modes,
    cached: Cached | None = None,
    same: bool = True,
) -> tuple[AttentionRequest, Sequences]:
    """The request of a call and its sequences; ValueError or TypeError for what is wrong with it."""
    mask, sequences = sequences_of(config, qkv, a, cached, same)
    q, k, v = qkv
    q_format = kv_format = config.qkv_format if a.qkv_format is None else a.qkv_format
    page_size = 0
    if cached is not None:
        k, v, kv_format, page_size = cached.key, cached.value, cached.tensor_format, cached.page_size
    shape = Shape(
        dtype=q.dtype,
        batch=known(sequences.queries.batch),
        heads=known(q.shape[-2]),
        groups=known(k.shape[-2]),
        seqlen_q=known(sequences.queries.size),
        seqlen_kv=known(sequences.keys.size),
        head_dim_qk=known(q.shape[-1]),
        head_dim_v=known(v.shape[-1]),
        q_format=q_format,
        kv_format=kv_format,
        page_size=page_size,
        bias_shape=None if a.bias is None else _known(a.bias.shape),
        slopes_shape=_known(_slopes_shape(config, a)),
        masked_shape=_known(a.attention_mask.shape) if sequences.arbitrary else None,  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    )
    options = _options(config, numbers, a, mask, modes, sequences)
    request = AttentionRequest(shape, options, device_of(q.device.type, modes.deterministic))
    check_bias(request, a.bias)
    return request, sequences


def _options(
    config: AttentionConfig,
    numbers: Numbers,
    a: CallArguments,
    mask: masks.Mask,
    modes: Modes,
    sequences: Sequences,
) -> Options:
    return Options(
        mask=mask,
        scale=numbers.scale,
        bias=a.bias_type,
        softmax=config.softmax_type,
        dropout=numbers.dropout,
        padded_between=sequences.padded_between,
        max_logit=config.return_max_logit,
        needs_gradient=modes.gradient,
        bias_gradient=modes.gradient and a.bias is not None and a.bias.requires_grad,
        slopes_given=a.alibi_slopes is not None,
        padding_tensors=sequences.queries.masked or sequences.keys.masked,
        same_lengths=sequences.keys.lengths == "queries",
        num_splits=0 if a.num_splits is None else a.num_splits,
        cached=a.inference_params is not None,
        score_mod=a.score_mod,
    )


def device_of(kind: str, deterministic: bool) -> Device:
    """Gradients are bitwise repeatable where torch, or the environment, says that they have to be."""
    capability = get_device_compute_capability() if kind == "cuda" else (0, 0)
    repeatable = deterministic or not env.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO")
    return Device(kind, capability, repeatable, Switches.from_environment())


def mask_name(config: AttentionConfig, a: CallArguments) -> str:
    """The type of mask that the call's name, else the layer's, comes to; over a cache sequences have their lengths."""
    name = config.attn_mask_type if a.attn_mask_type is None else masks.canonical_name(a.attn_mask_type)
    return name if a.inference_params is None else masks.over_cached_keys(name)


def _mask(config: AttentionConfig, a: CallArguments) -> masks.Mask:
    """What the names and windows of the call, else of the layer, mean together."""
    return masks.resolve(
        mask_name(config, a),
        config.window_size if a.window_size is None else a.window_size,
        config.bottom_right_diagonal if a.bottom_right_diagonal is None else a.bottom_right_diagonal,
    )


def _slopes_shape(config: AttentionConfig, a: CallArguments) -> tuple[int, ...] | None:
    if a.alibi_slopes is not None:
        return a.alibi_slopes.shape
    return (config.heads,) if a.bias_type == "alibi" else None


def known(size: int) -> int:
    """The size; where a tracing compiler has a symbol for it, the number, which its graph is then guarded by.

    A choice is made for numbers: each longest sequence has a graph of its own. The tokens of packed sequences, which
    no choice depends on, stay a symbol.
    """
    # The bounds of a range are what every version of the tracer wants a number for.
    return len(range(size)) if torch.compiler.is_compiling() else size


def _known(shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if shape is None else tuple(known(size) for size in shape)
