"""Checks on what an attention is called with; every message names the value, the limit and the remedy."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....common.checks import described, function, one_of, switch, whole_or_none
from ... import checks
from ...constants import AttnTypes
from ...module.arguments import Rule, window
from .mask import canonical_name
from .request import BIAS_TYPES, QKV_FORMATS, SOFTMAX_TYPES, AttentionRequest

if TYPE_CHECKING:
    from .dot_product_attention import DotProductAttention

# What the constructors of attention layers have beside the arguments of all layers.
RULES: dict[str, Rule] = {
    **dict.fromkeys(("attn_input_format", "qkv_format"), partial(one_of, allowed=QKV_FORMATS)),
    "attention_type": partial(one_of, allowed=AttnTypes),
    "softmax_type": partial(one_of, allowed=SOFTMAX_TYPES),
    **dict.fromkeys(
        ("attn_mask_type", "self_attn_mask_type", "enc_dec_attn_mask_type"),
        lambda name, value: canonical_name(value, name),
    ),
}


def check_heads(heads: int, groups: int, tp_size: int) -> None:
    """ValueError unless ranks share heads and groups evenly, and groups share heads."""
    if heads % tp_size:
        raise ValueError(f"tp_size={tp_size} does not divide num_attention_heads={heads}; choose a divisor")
    if groups % tp_size:
        raise ValueError(f"tp_size={tp_size} does not divide num_gqa_groups={groups}; choose a divisor")
    if heads % groups:
        raise ValueError(
            f"num_gqa_groups={groups} does not divide num_attention_heads={heads}; choose a divisor"
        )


def unpacked(
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    qkv: Tensor | None,
    kv: Tensor | None,
    axis: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v, as given one by one or as views of packed buffers; ValueError for a tensor given twice."""
    if qkv is not None:
        _given_once("qkv_layer", query_layer=q, key_layer=k, value_layer=v, kv_layer=kv)
        q, k, v = _parts("qkv_layer", qkv, 3, axis)
    elif kv is not None:
        _given_once("kv_layer", key_layer=k, value_layer=v)
        k, v = _parts("kv_layer", kv, 2, axis)
    if q is None or k is None or v is None:
        missing = [
            name for name, x in (("query_layer", q), ("key_layer", k), ("value_layer", v)) if x is None
        ]
        raise ValueError(
            f"{' and '.join(f'{name}=None' for name in missing)} missing; give queries, keys and values"
        )
    return q, k, v


def _given_once(packed: str, **others: Tensor | None) -> None:
    for name, tensor in others.items():
        if tensor is not None:
            raise ValueError(
                f"{name}={described(tensor)} beside {packed}, which holds it; leave one of them out"
            )


def _parts(name: str, packed: Tensor, count: int, axis: int) -> tuple[Tensor, ...]:
    """The views of a packed buffer along its axis -3 or -2."""
    checks.tensor(name, packed)
    one_of("qkv_interleave_dim", axis, (-3, -2))
    if packed.ndim < 3 or packed.shape[axis] != count:
        raise ValueError(
            f"{name} is {list(packed.shape)}; its axis {axis} must have the size {count}, or set qkv_interleave_dim"
        )
    return packed.unbind(axis)


def check_call(
    window_size: Any,
    switches: tuple[Any, ...],
    max_seqlens: tuple[Any, Any],
    num_splits: Any,
    score_mod: Any,
    bias_type: Any,
    bias: Any,
    inference_params: Any,
) -> None:
    """TypeError or ValueError for settings of a call that are of the wrong kind; the usual ones cost a comparison.

    switches   bottom_right_diagonal, checkpoint_core_attention, pad_between_seqs, fp8_output, bf16_backward
    """
    if window_size is not None:
        window("window_size", window_size)
    for index, value in enumerate(switches):
        if value is not None and value is not False and value is not True:
            switch(_SWITCHES[index], value)
    if type(num_splits) is not int or num_splits < 0:
        whole_or_none("num_splits", num_splits, 0)
    if score_mod is not None:
        function("score_mod", score_mod)
    if type(bias_type) is not str:
        one_of("core_attention_bias_type", bias_type, BIAS_TYPES)
    if bias is not None:
        checks.tensor("core_attention_bias", bias)
    for name, value in zip(("max_seqlen_q", "max_seqlen_kv"), max_seqlens, strict=True):
        if value is not None and type(value) is not int:
            whole_or_none(name, value, 0)
    if inference_params is not None and not hasattr(inference_params, "step"):
        raise TypeError(
            f"inference_params={described(inference_params)} is a {type(inference_params).__name__}; give an "
            "InferenceParams, or None"
        )


_SWITCHES = (
    "bottom_right_diagonal",
    "checkpoint_core_attention",
    "pad_between_seqs",
    "fp8_output",
    "bf16_backward",
)


def check_settings(
    attention: DotProductAttention,
    attn_mask_type: str | None,
    window_size: tuple[int, int] | None,
    switches: tuple[bool | None, ...],
    max_seqlens: tuple[int | None, int | None],
    bias_type: str,
    bias: Tensor | None,
    slopes: Tensor | None,
    inference_params: Any,
) -> None:
    """What an attention's forward refuses of a call's settings, for layers that do other work before they call it."""
    check_call(window_size, switches, max_seqlens, 1, None, bias_type, bias, inference_params)
    check_bias_kind(bias_type, bias, slopes)
    bottom_right = switches[0]
    if attn_mask_type is None and window_size is None and bottom_right is None:
        return
    attention.resolved_mask(
        attention.attn_mask_type if attn_mask_type is None else canonical_name(attn_mask_type),
        attention.given_window if window_size is None else window_size,
        attention.bottom_right_diagonal if bottom_right is None else bottom_right,
    )


def check_angles(rotary_pos_emb: Any) -> None:
    """TypeError unless these are the angles of a rotary embedding, one table or a pair."""
    tables = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb,) * 2
    if len(tables) != 2:
        raise ValueError(
            f"rotary_pos_emb holds {len(tables)} tables; give one, or a pair for queries and keys"
        )
    for table in tables:
        checks.floating("rotary_pos_emb", table)


def check_slopes(slopes: Tensor, bias_type: str, q: Tensor, heads: int) -> Tensor:
    """The slopes; TypeError or ValueError unless they are [h] or [b, h] for "alibi", floating point on q's device."""
    check_bias_kind(bias_type, None, slopes)
    checks.floating("alibi_slopes", slopes)
    checks.same_device("alibi_slopes", slopes, "query_layer", q)
    if slopes.ndim not in (1, 2) or slopes.shape[-1] != heads:
        raise ValueError(
            f"alibi_slopes {list(slopes.shape)} does not end in {heads} heads; give [h], or [b, h]"
        )
    return slopes


def check_cache(layer_number: int | None, cached: torch.dtype, given: torch.dtype) -> int:
    """layer_number; ValueError unless there is one, and the cache has the dtype of the layer's queries."""
    if layer_number is None:
        raise ValueError("inference_params needs layer_number, which names the cache; set it at construction")
    if cached != given:
        raise ValueError(
            f"inference_params has dtype={cached}, query_layer is {given}; make the cache with the layer's dtype"
        )
    return layer_number


def check_bias_kind(bias_type: str, bias: Tensor | None, slopes: Tensor | None) -> None:
    """ValueError unless the type of the bias is known, and a bias or slopes are given where it asks for them."""
    one_of("core_attention_bias_type", bias_type, BIAS_TYPES)
    takes_bias = bias_type in ("pre_scale_bias", "post_scale_bias")
    if takes_bias != (bias is not None):
        want = "needs" if takes_bias else "takes no"
        given = "None" if bias is None else described(bias)
        raise ValueError(
            f"core_attention_bias_type={bias_type!r} {want} core_attention_bias, which is {given}; match the two"
        )
    if slopes is not None and bias_type != "alibi":
        raise ValueError(
            f"alibi_slopes with core_attention_bias_type={bias_type!r}, which ignores {described(slopes)}; use 'alibi'"
        )


def check_bias(request: AttentionRequest, bias: Tensor | None) -> None:
    """ValueError or TypeError unless bias and slopes are what the bias type asks for."""
    check_bias_kind(request.bias, bias, None)
    slopes = request.slopes_shape
    if (
        request.slopes_given
        and slopes is not None
        and len(slopes) == 2
        and slopes[0] not in (1, request.batch)
    ):
        raise ValueError(
            f"alibi_slopes is {list(slopes)}, the batch has {request.batch} sequences; give [h], or [b, h]"
        )
    if bias is None:
        return
    if not bias.is_floating_point() or bias.device.type != request.device_type:
        raise TypeError(
            f"core_attention_bias is {bias.dtype} on {bias.device}; give floating-point values on the queries' device, "
            f"{request.device_type}"
        )
    shape = (request.batch, request.heads, request.seqlen_q, request.seqlen_kv)
    if bias.ndim != 4 or any(size not in (1, limit) for size, limit in zip(bias.shape, shape, strict=True)):
        raise ValueError(
            f"core_attention_bias {list(bias.shape)} does not broadcast to {list(shape)}; give these sizes, or 1"
        )


def check_tensors(
    q: Tensor, k: Tensor, v: Tensor, qkv_format: str, heads: int, groups: int, size_qk: int, size_v: int
) -> None:
    """ValueError unless q, k, v have the heads and sizes of the layer, one dtype and one device."""
    axes = len(qkv_format)
    expected = {
        "query_layer": (q, heads, size_qk),
        "key_layer": (k, groups, size_qk),
        "value_layer": (v, groups, size_v),
    }
    for name, (tensor, count, size) in expected.items():
        if not isinstance(tensor, Tensor):
            checks.tensor(name, tensor)
        if tensor.ndim != axes or tensor.shape[-2:] != (count, size):
            raise ValueError(
                f"{name} is {list(tensor.shape)}, {qkv_format!r} needs {axes} axes that end in "
                f"(heads, size) = ({count}, {size}); reshape it"
            )
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, query_layer {q.dtype} on {q.device}; convert"
            )
    if not q.is_floating_point():
        raise TypeError(f"query_layer is {q.dtype}; give floating-point values")
    if k.shape[:-2] != v.shape[:-2]:
        raise ValueError(f"key_layer {list(k.shape)} and value_layer {list(v.shape)} differ in their tokens")
