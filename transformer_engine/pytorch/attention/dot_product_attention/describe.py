"""The AttentionCall for the arguments of an attention, after every check that needs no tensor values.

Shapes, names and modes decide, so q, k, v and the arguments may be tensor descriptions: an attention layer
checks its core attention's call before its projections compute, and the result is cached.
"""

from __future__ import annotations

from typing import Any

import torch

from ...primitives.attention import mask as masks
from ...primitives.attention.call import QKV_FORMATS, AttentionCall
from ...runtime.tracing import export_mode
from .arguments import check_bias, check_cache, check_option, check_tensors
from .sequences import Cached, Sequences, cached_sequences, parse_sequences, unknown_sequences
from .settings import AttentionArguments, AttentionConfig, TensorFacts, is_tensor


def describe_sequences(
    config: AttentionConfig,
    qkv: tuple[Any, Any, Any],
    a: AttentionArguments,
    cached: Cached | None,
    same_lengths: bool,
) -> tuple[masks.Mask, Sequences]:
    """Resolve the mask and the sequences of a call.

    Args:
        config: Attention settings.
        qkv: q, k and v, or descriptions of them.
        a: Call arguments.
        cached: Metadata for the cached keys and values; None with inference_params if only a custom manager has it.
        same_lengths: Result from `are_same`.

    Raises:
        TypeError, ValueError: An argument does not fit the layer or another argument.
    """
    q, k, v = qkv
    tensor_format = config.qkv_format if a.qkv_format is None else a.qkv_format
    check_option("qkv_format", tensor_format, QKV_FORMATS)
    if config.context is not None:
        (q, k, v), a = whole_sequence(config, tensor_format, qkv, a)
    check_tensors(q, k, v, tensor_format, config)
    mask = masks.resolve(
        mask_name(config, a),
        config.window_size if a.window_size is None else a.window_size,
        config.bottom_right_diagonal
        if a.bottom_right_diagonal is None
        else a.bottom_right_diagonal,
    )
    if cached is not None:
        if cached.limits is not None:
            check_cache(config.layer_number, cached.limits.dtype, q.dtype)
            cached.limits.check(k, v, tensor_format)
        return mask, cached_sequences(q, tensor_format, a.max_seqlen_q, cached)
    if a.inference_params is not None:
        return mask, unknown_sequences(q, tensor_format)
    return mask, parse_sequences(q, k, tensor_format, mask, config.attention_type, a, same_lengths)


def describe_call(
    config: AttentionConfig,
    training: bool,
    qkv: tuple[Any, Any, Any],
    a: AttentionArguments,
    gradient: bool,
    deterministic: int,
    cached: Cached | None = None,
    same_lengths: bool = True,
) -> tuple[AttentionCall, Sequences]:
    """Return the AttentionCall for the arguments of an attention, and its sequences.

    Args:
        gradient: An input gradient is needed, or may be needed in a second run of the call.
        deterministic: torch_determinism().

    The other arguments and the errors are as in `describe_sequences`.
    """
    mask, sequences = describe_sequences(config, qkv, a, cached, same_lengths)
    q_format = kv_format = config.qkv_format if a.qkv_format is None else a.qkv_format
    if config.context is not None:
        qkv, a = whole_sequence(config, q_format, qkv, a)
    q, k, v = qkv
    queries, keys, bias = sequences.queries, sequences.keys, a.core_attention_bias
    seqlen_q, seqlen_kv = known(queries.size), known(keys.size)
    page_size = 0
    if cached is not None:
        k, v, kv_format, page_size = (
            cached.key,
            cached.value,
            cached.tensor_format,
            cached.page_size,
        )
    slopes_shape = None if a.alibi_slopes is None else a.alibi_slopes.shape
    if slopes_shape is None and a.core_attention_bias_type == "alibi":
        slopes_shape = (config.heads,)
    scale, dropout = config.scale_and_dropout(training)
    call = AttentionCall.on(
        q.device.type,
        deterministic,
        dtype=q.dtype,
        batch=known(queries.batch),
        heads=known(q.shape[-2]),
        groups=known(k.shape[-2]),
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        head_dim_qk=known(q.shape[-1]),
        head_dim_v=known(v.shape[-1]),
        q_format=q_format,
        kv_format=kv_format,
        page_size=page_size,
        bias_shape=None if bias is None else _concrete_shape(bias.shape),
        slopes_shape=None if slopes_shape is None else _concrete_shape(slopes_shape),
        masked_shape=_concrete_shape(a.attention_mask.shape) if sequences.arbitrary else None,  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
        # A comparison would fix the symbolic sizes of an export.
        mask=mask if export_mode.onnx else mask.within(max(seqlen_q, seqlen_kv)),
        scale=scale,
        bias=a.core_attention_bias_type,
        softmax=config.softmax_type,
        softcap=config.softcap_of_call(a.softcap),
        dropout=dropout,
        padded_between=sequences.padded_between,
        max_logit=config.return_max_logit,
        needs_gradient=gradient,
        bias_gradient=gradient and bias is not None and bias.requires_grad,
        slopes_given=a.alibi_slopes is not None,
        padding_tensors=queries.masked or keys.masked,
        same_lengths=keys.lengths == "queries",
        num_splits=0 if a.num_splits is None else a.num_splits,
        cached=a.inference_params is not None,
        score_mod=a.score_mod,
    )
    check_bias(call, bias)
    return call, sequences


def whole_sequence(
    config: AttentionConfig, tensor_format: str, qkv: tuple[Any, Any, Any], a: AttentionArguments
) -> tuple[tuple[Any, Any, Any], AttentionArguments]:
    """Describe the whole tensors that ranks share, given one rank's tensors.

    Lengths and padding masks already describe whole sequences. A bias and an arbitrary mask have
    the rank's queries as rows, and all keys as columns.
    """
    context = config.context
    assert context is not None
    axis = 1 if tensor_format == "bshd" else 0
    tokens = qkv[0].shape[axis] if len(qkv[0].shape) > 1 else 0
    tensors = tuple(_lengthen_axis(x, axis, context.size) if len(x.shape) > 1 else x for x in qkv)
    bias_argument = {"core_attention_bias": a.core_attention_bias}
    if mask_name(config, a) == "arbitrary":
        bias_argument["attention_mask"] = a.attention_mask  # pyright: ignore[reportArgumentType]
    for name, x in bias_argument.items():
        if not is_tensor(x) or len(x.shape) < 2 or x.shape[-2] == 1 or tensor_format == "thd":  # pyright: ignore[reportOptionalMemberAccess]
            continue
        if x.shape[-2] != tokens:  # pyright: ignore[reportOptionalMemberAccess]
            raise ValueError(
                f"{name} {list(x.shape)} has {x.shape[-2]} rows; a context-parallel rank gives the rows of its "  # pyright: ignore[reportOptionalMemberAccess]
                f"{tokens} queries, in their order, and the columns of all keys"
            )
        a = a._replace(**{name: _lengthen_axis(x, x.ndim - 2, context.size)})  # pyright: ignore[reportOptionalMemberAccess]
    return tensors, a  # pyright: ignore[reportReturnType]


def _lengthen_axis(x: Any, axis: int, size: int) -> TensorFacts:
    """Describe a tensor whose axis is `size` times as long."""
    shape = list(x.shape)
    shape[axis] *= size
    return TensorFacts(torch.Size(shape), x.dtype, x.device, x.requires_grad)


def mask_name(config: AttentionConfig, a: AttentionArguments) -> str:
    """Return the mask type of the call, by default the layer's; with a cache, sequences have individual lengths."""
    name = (
        config.attn_mask_type
        if a.attn_mask_type is None
        else masks.canonical_name(a.attn_mask_type)
    )
    return name if a.inference_params is None else masks.cached_mask_type(name)


def known(size: int) -> int:
    """Return a size as a number where a tracing compiler has a symbol, which guards the graph.

    A backend is chosen for numbers: each longest sequence has a separate graph. Packed token
    counts, on which no choice depends, stay symbolic.
    """
    # Every tracer version needs a number for range bounds.
    return len(range(size)) if torch.compiler.is_compiling() and not export_mode.onnx else size


def _concrete_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(known(size) for size in shape)
