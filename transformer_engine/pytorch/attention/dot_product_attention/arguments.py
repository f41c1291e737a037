"""Checks and conversions for attention layer arguments."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....common.checks import check_option, described, function
from ....common.numbers import to_bool, to_int, with_article
from ...constants import AttnTypes
from ...module.arguments import Rule, checked, limit
from ...primitives.attention.call import BIAS_TYPES, QKV_FORMATS, SOFTMAX_TYPES, AttentionCall
from ...primitives.attention.mask import canonical_name, window_pair
from ...runtime import checks
from ...runtime.tracing import specialize
from ...runtime.warn_once import warn_once
from ..inference import InferenceParams
from .settings import AttentionArguments, AttentionConfig, TensorFacts

# Whether policies for packed sequences mask the whole buffer, if a backend can, or gather their tokens first.
DISPATCHES = ("auto", "grouped")

# Rules for constructor arguments that only attention layers have.
RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("attn_input_format", "qkv_format"), checked(partial(check_option, allowed=QKV_FORMATS))
    ),
    "attention_type": checked(partial(check_option, allowed=AttnTypes)),
    "softmax_type": checked(partial(check_option, allowed=SOFTMAX_TYPES)),
    **dict.fromkeys(
        ("attn_mask_type", "self_attn_mask_type", "enc_dec_attn_mask_type"),
        checked(lambda name, value: canonical_name(value, name)),
    ),
}


def check_heads(heads: int, groups: int, tp_size: int) -> None:
    """Raise ValueError unless ranks share heads and groups evenly, and groups share heads."""
    if heads % tp_size:
        raise ValueError(
            f"tp_size={tp_size} does not divide num_attention_heads={heads}; choose a divisor"
        )
    if groups % tp_size:
        raise ValueError(
            f"tp_size={tp_size} does not divide num_gqa_groups={groups}; choose a divisor"
        )
    if heads % groups:
        raise ValueError(
            f"num_gqa_groups={groups} does not divide num_attention_heads={heads}; choose a divisor"
        )


def unpack_qkv(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    qkv: Tensor | None,
    kv: Tensor | None,
    axis: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v, given one by one or as packed buffer views.

    Raises:
        ValueError: A tensor is missing, or given twice.
    """
    if qkv is not None:
        _reject_second_form("qkv_layer", query_layer=q, key_layer=k, value_layer=v, kv_layer=kv)
        q, k, v = _parts("qkv_layer", qkv, 3, axis)
    elif kv is not None:
        _reject_second_form("kv_layer", key_layer=k, value_layer=v)
        k, v = _parts("kv_layer", kv, 2, axis)
    if q is None or k is None or v is None:
        missing = [
            name
            for name, x in (("query_layer", q), ("key_layer", k), ("value_layer", v))
            if x is None
        ]
        raise ValueError(
            f"{' and '.join(f'{name}=None' for name in missing)} missing; give queries, keys and values"
        )
    for name, x in (("query_layer", q), ("key_layer", k), ("value_layer", v)):
        if not isinstance(x, Tensor):
            checks.tensor(name, x)
    return q, k, v


def _reject_second_form(packed: str, **others: Tensor | None) -> None:
    for name, tensor in others.items():
        if tensor is not None:
            raise ValueError(
                f"{name}={described(tensor)} is given together with {packed}, which contains it; leave one of them out"
            )


def _parts(name: str, packed: Tensor, count: int, axis: int) -> tuple[Tensor, ...]:
    """Return the views of a packed buffer along its axis -3 or -2."""
    checks.tensor(name, packed)
    check_option("qkv_interleave_dim", axis, (-3, -2))
    if packed.ndim < 3 or packed.shape[axis] != count:
        raise ValueError(
            f"{name} is {list(packed.shape)}; its axis {axis} must have the size {count}, or set qkv_interleave_dim"
        )
    return packed.unbind(axis)


def settle_arguments(config: AttentionConfig, a: AttentionArguments) -> AttentionArguments:
    """Convert the arguments of a call to their annotated types, without arguments that the call ignores.

    Two calls whose arguments compare equal afterwards are computed alike, so the arguments can be
    key parts. Length tensors are checked where they are read.

    Raises:
        TypeError: A setting has a type that cannot be used.
        ValueError: A setting is outside its limits.
    """
    if a.core_attention_bias_type != "no_bias":
        check_option("core_attention_bias_type", a.core_attention_bias_type, BIAS_TYPES)
    if a.thd_attention_policy_dispatch not in DISPATCHES:
        check_option("thd_attention_policy_dispatch", a.thd_attention_policy_dispatch, DISPATCHES)
    if a.bottom_right_diagonal is not None and type(a.bottom_right_diagonal) is not bool:
        a = a._replace(
            bottom_right_diagonal=to_bool("bottom_right_diagonal", a.bottom_right_diagonal)
        )
    if a.pad_between_seqs is not None and type(a.pad_between_seqs) is not bool:
        a = a._replace(pad_between_seqs=to_bool("pad_between_seqs", a.pad_between_seqs))
    if a.num_splits is not None and (type(a.num_splits) is not int or a.num_splits < 0):
        a = a._replace(num_splits=to_int("num_splits", a.num_splits, 0))
    if a.softcap is not None and (type(a.softcap) is not float or not 0.0 <= a.softcap < math.inf):
        a = a._replace(softcap=limit("softcap", specialize(a.softcap)))
    if (
        a.cu_seqlens_kv is None
        and a.cu_seqlens_kv_padded is not None
        and config.attention_type == "self"
    ):
        a = a._replace(cu_seqlens_kv=a.cu_seqlens_q)  # keys have the queries' lengths by default
    if a.score_mod is not None:
        function("score_mod", a.score_mod)
    if a.core_attention_bias is not None or a.alibi_slopes is not None:
        # A bias or slopes that the bias type does not read are dropped, with a warning once.
        if a.core_attention_bias is not None and a.core_attention_bias_type == "no_bias":
            warn_once(
                "core_attention_bias",
                "core_attention_bias has no effect with core_attention_bias_type='no_bias'; give "
                "core_attention_bias_type='post_scale_bias' to add it to the scaled scores, or leave it None",
            )
            a = a._replace(core_attention_bias=None)
        if a.core_attention_bias is not None and not isinstance(a.core_attention_bias, Tensor):
            checks.tensor("core_attention_bias", a.core_attention_bias)
        if a.alibi_slopes is not None and a.core_attention_bias_type != "alibi":
            warn_once(
                "alibi_slopes",
                f"alibi_slopes has no effect with core_attention_bias_type={a.core_attention_bias_type!r}; give "
                "core_attention_bias_type='alibi', or leave it None",
            )
            a = a._replace(alibi_slopes=None)
    if a.inference_params is not None and type(a.inference_params) is not InferenceParams:
        check_cache_kind(a.inference_params)
    if a.qkv_format is not None:
        check_option("qkv_format", a.qkv_format, QKV_FORMATS)
    if a.attn_mask_type is not None and not isinstance(a.attn_mask_type, str):
        canonical_name(a.attn_mask_type)
    if a.attention_mask is not None:
        a = a._replace(attention_mask=prepare_mask(config, a))
    if a.window_size is not None:
        a = a._replace(window_size=window_pair(a.window_size))
    longest_q, longest_kv = a.max_seqlen_q, a.max_seqlen_kv
    if (type(longest_q) is int or longest_q is None) and (
        type(longest_kv) is int or longest_kv is None
    ):
        return a
    return a._replace(
        max_seqlen_q=whole_length("q", longest_q), max_seqlen_kv=whole_length("kv", longest_kv)
    )


def prepare_mask(config: AttentionConfig, a: AttentionArguments) -> Any:
    """Return the attention mask of a call as bool tensors, or None where the mask type does not read one.

    Only padding and arbitrary mask types read a mask. An integer mask masks where it is not 0, and
    so does a floating-point padding mask. A floating-point arbitrary mask is not converted: it
    might be meant to be added to the scores.
    """
    name = config.attn_mask_type if a.attn_mask_type is None else canonical_name(a.attn_mask_type)
    mask: Any = a.attention_mask
    padding = name.startswith("padding")
    if a.inference_params is not None or not (padding or name == "arbitrary"):
        if isinstance(mask, Tensor) and mask.is_floating_point():
            warn_once(
                "attention_mask",
                f"attention_mask has no effect with attn_mask_type={name!r}, which reads no mask; give a padding mask "
                "type, attn_mask_type='arbitrary' with a bool mask, or core_attention_bias with 'post_scale_bias' for "
                "values that are added to the scores",
            )
        return None
    if isinstance(mask, (list, tuple)):
        return tuple(_as_bool(part, padding) for part in mask)
    return _as_bool(mask, padding)


def _as_bool(mask: Any, padding: bool) -> Any:
    """Return one mask as a bool tensor; other objects and additive masks are left to `_check_masks`."""
    if not isinstance(mask, Tensor) or mask.dtype == torch.bool:
        return mask
    if mask.is_complex() or (mask.is_floating_point() and not padding):
        return mask
    return mask.ne(0)


def whole_length(name: str, size: Any) -> int | None:
    """Convert max_seqlen_*, a number in any form, to a nonnegative int."""
    if size is None or torch.compiler.is_compiling():
        return size
    try:
        length = to_int(f"max_seqlen_{name}", size)
    except TypeError:
        raise ValueError(
            f"max_seqlen_{name}={described(size)} is not a whole number; give the tokens of the longest sequence"
        ) from None
    if length < 0:
        raise ValueError(
            f"max_seqlen_{name}={length} is below 0; give the tokens of the longest sequence"
        )
    return length


def check_cache_kind(inference_params: Any) -> None:
    """Raise TypeError for an object that is not a key-value cache."""
    if not hasattr(inference_params, "step"):
        raise TypeError(
            f"inference_params={described(inference_params)} is {with_article(type(inference_params))}; give an "
            "InferenceParams, or None"
        )


def accept_angles(rotary_pos_emb: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Return rotary embedding angles: one table, or a pair for queries and keys.

    Raises:
        TypeError: A table is not a floating-point tensor.
        ValueError: There are neither one nor two tables.
    """
    if not isinstance(rotary_pos_emb, (tuple, list)):
        checks.floating("rotary_pos_emb", rotary_pos_emb)
        return rotary_pos_emb
    if len(rotary_pos_emb) != 2:
        raise ValueError(
            f"rotary_pos_emb holds {len(rotary_pos_emb)} tables; give one, or a pair for queries and keys"
        )
    for table in rotary_pos_emb:
        checks.floating("rotary_pos_emb", table)
    return tuple(rotary_pos_emb)


def check_cache(layer_number: int | None, cached: torch.dtype, requested: torch.dtype) -> int:
    """Return the layer number, which a cache needs.

    Raises:
        ValueError: The layer has no number, or the cache has another dtype than the queries.
    """
    if layer_number is None:
        raise ValueError(
            "inference_params needs layer_number, which names the cache; set it at construction"
        )
    if cached != requested:
        raise ValueError(
            f"inference_params has dtype={cached}, query_layer is {requested}; make the cache with the layer's dtype"
        )
    return layer_number


def check_bias(call: AttentionCall, bias: Tensor | TensorFacts | None) -> None:
    """Check that bias and slopes match the bias type.

    Raises:
        TypeError: The bias is not floating point, or on another device than the queries.
        ValueError: The bias is missing or superfluous, or a shape does not broadcast.
    """
    takes_bias = call.bias in ("pre_scale_bias", "post_scale_bias")
    if takes_bias != (bias is not None):
        verb = "needs" if takes_bias else "takes no"
        description = (
            "None" if bias is None else f"a Tensor of shape {list(bias.shape)} and {bias.dtype}"
        )
        raise ValueError(
            f"core_attention_bias_type={call.bias!r} {verb} core_attention_bias, which is {description}; match the two"
        )
    slopes = call.slopes_shape
    if (
        call.slopes_given
        and slopes is not None
        and len(slopes) == 2
        and slopes[0] not in (1, call.batch)
    ):
        raise ValueError(
            f"alibi_slopes is {list(slopes)}, the batch has {call.batch} sequences; give [h], or [b, h]"
        )
    if bias is None:
        return
    if not bias.dtype.is_floating_point or bias.device.type != call.device_type:
        raise TypeError(
            f"core_attention_bias is {bias.dtype} on {bias.device}; give floating-point values on the queries' device, "
            f"{call.device_type}"
        )
    shape = (call.batch, call.heads, call.seqlen_q, call.seqlen_kv)
    if bias.ndim != 4 or any(
        size not in (1, limit) for size, limit in zip(bias.shape, shape, strict=True)
    ):
        raise ValueError(
            f"core_attention_bias {list(bias.shape)} does not broadcast to {list(shape)}; give these sizes, or 1"
        )


def check_tensors(q: Any, k: Any, v: Any, qkv_format: str, config: AttentionConfig) -> None:
    """Raise ValueError unless q, k, v have the heads and sizes of the layer, one dtype and one device."""
    axes, groups = len(qkv_format), config.num_gqa_groups_per_partition
    expected = {
        "query_layer": (q, config.heads, config.head_dim_qk),
        "key_layer": (k, groups, config.head_dim_qk),
        "value_layer": (v, groups, config.head_dim_v),
    }
    for name, (tensor, count, size) in expected.items():
        if len(tensor.shape) != axes or tensor.shape[-2:] != (count, size):
            raise ValueError(
                f"{name} is {list(tensor.shape)}, {qkv_format!r} needs {axes} axes that end in "
                f"(heads, size) = ({count}, {size}); reshape it"
            )
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, query_layer {q.dtype} on {q.device}; convert one of them"
            )
    if not q.dtype.is_floating_point:
        raise TypeError(f"query_layer is {q.dtype}; give floating-point values")
    if k.shape[:-2] != v.shape[:-2]:
        raise ValueError(
            f"key_layer {list(k.shape)} and value_layer {list(v.shape)} differ in their tokens; "
            "give both the same"
        )


def sink_logit(
    softmax_type: str, offset: Tensor | None, heads: int, device: torch.device
) -> Tensor | None:
    """Return the logit [h] for a key without a value, by softmax type; None for "vanilla"."""
    if softmax_type == "off-by-one":
        return torch.zeros(heads, dtype=torch.float32, device=device)
    if softmax_type != "learnable":
        return None
    if offset is None:
        raise ValueError(
            "softmax_type='learnable' was set on an attention without the parameter softmax_offset; make one with "
            "DotProductAttention(softmax_type='learnable')"
        )
    return offset


def accept_older_state(state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Accept checkpoints that have this module's extra state one level deeper, or not at all."""
    older = state_dict.pop(prefix + "fused_attention._extra_state", None)
    if prefix + "_extra_state" not in state_dict:
        state_dict[prefix + "_extra_state"] = (
            torch.empty(0, dtype=torch.uint8, device="cpu") if older is None else older
        )
