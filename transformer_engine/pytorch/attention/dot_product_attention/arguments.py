"""Checks on what an attention is called with; every message names the value, the limit and the remedy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .request import AttentionRequest


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """ValueError unless value is allowed."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} does not exist; choose one of {', '.join(allowed)}")


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
    """q, k, v, as given one by one or as views of packed buffers."""
    if qkv is not None:
        q, k, v = qkv.unbind(axis)
    elif kv is not None:
        k, v = kv.unbind(axis)
    if q is None or k is None or v is None:
        raise ValueError("queries, keys or values are missing; give query_layer, key_layer and value_layer")
    return q, k, v


def check_cache(layer_number: int | None, cached: torch.dtype, given: torch.dtype) -> int:
    """layer_number; ValueError unless there is one, and the cache has the dtype of the layer's queries."""
    if layer_number is None:
        raise ValueError("inference_params needs layer_number, which names the cache; set it at construction")
    if cached != given:
        raise ValueError(
            f"inference_params has dtype={cached}, query_layer is {given}; make the cache with the layer's dtype"
        )
    return layer_number


def check_bias(request: AttentionRequest, bias: Tensor | None) -> None:
    """ValueError unless the bias's presence and shape are what the bias type asks for."""
    takes_bias = request.bias in ("pre_scale_bias", "post_scale_bias")
    if takes_bias != (bias is not None):
        want = "needs" if takes_bias else "takes no"
        raise ValueError(f"core_attention_bias_type={request.bias!r} {want} core_attention_bias")
    if bias is None:
        return
    shape = (request.batch, request.heads, request.seqlen_q, request.seqlen_kv)
    if bias.ndim != 4 or any(size not in (1, limit) for size, limit in zip(bias.shape, shape, strict=True)):
        raise ValueError(f"core_attention_bias {list(bias.shape)} does not broadcast to {list(shape)}")


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
        if tensor.ndim != axes or tensor.shape[-2:] != (count, size):
            raise ValueError(
                f"{name} is {list(tensor.shape)}, {qkv_format!r} needs {axes} axes that end in "
                f"(heads, size) = ({count}, {size})"
            )
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, query_layer {q.dtype} on {q.device}; convert"
            )
    if k.shape[:-2] != v.shape[:-2]:
        raise ValueError(f"key_layer {list(k.shape)} and value_layer {list(v.shape)} differ in their tokens")


def sink_of(softmax_type: str, offset: Tensor | None, heads: int, device: torch.device) -> Tensor | None:
    """The logit [h] of a key without a value, as the softmax's type has it; None for the usual softmax."""
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
    """Take checkpoints that have this module's extra state one level deeper, or not at all."""
    older = state_dict.pop(prefix + "fused_attention._extra_state", None)
    if prefix + "_extra_state" not in state_dict:
        state_dict[prefix + "_extra_state"] = torch.empty(0, dtype=torch.uint8) if older is None else older
