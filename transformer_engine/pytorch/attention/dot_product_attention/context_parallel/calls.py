"""attn_forward_func_with_cp: context-parallel attention as a function, which the modules do not need."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import Tensor

from ....constants import AttentionType, CPLoadBalancingStrategy, SoftmaxType, TensorFormat
from ....runtime.warn_once import warn_once
from ..dot_product_attention import DotProductAttention


def attn_forward_func_with_cp(
    is_training: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    dropout_p: float,
    cp_group: Any,
    cp_global_ranks: Any,
    cp_stream: Any,
    cp_comm_type: str,
    softmax_scale: float | None = None,
    qkv_format: TensorFormat = "bshd",
    attn_mask_type: str = "causal",
    attn_bias_type: str = "no_bias",
    attn_bias: Tensor | None = None,
    deterministic: bool = False,
    use_fused_attention: bool = False,
    window_size: tuple[int, int] | None = None,
    fp8: bool = False,
    fp8_meta: dict[str, Any] | None = None,
    quantizers: Any = None,
    pad_between_seqs: bool | None = None,
    use_flash_attn_3: bool = False,
    softmax_type: SoftmaxType = "vanilla",
    softmax_offset: Tensor | None = None,
    fp8_output: bool = False,
    layer_number: int | None = None,
    return_max_logit: bool = False,
    load_balancing_strategy: CPLoadBalancingStrategy = CPLoadBalancingStrategy.DUAL_CHUNK_SWAP,
    **unused: Any,
) -> Any:
    """Compute attention from a rank's tokens to the tokens on all ranks that share the sequences.

    Args:
        is_training: Apply dropout.
        q: Queries of this rank, in qkv_format, [.., h, d].
        k: Keys of this rank, [.., g, d].
        v: Values of this rank, [.., g, d_v].
        dropout_p: Softmax dropout rate.
        attn_bias: Bias with the rank's queries as rows and all keys as columns.
        fp8: Compute in FP8, by the recipe of `autocast`.
        softmax_offset: Learnable softmax logits [h] or [1, h, 1, 1].
        use_fused_attention, use_flash_attn_3, fp8_meta, quantizers, layer_number: Have no effect; te.explain prints how
            a backend is chosen.

    The other arguments are as in `DotProductAttention` and its `set_context_parallel_group`.
    Lengths and bounds describe whole sequences.

    Returns:
        The output [.., h, d_v] in q's layout, or (output, largest logits [h]) with return_max_logit.

    Raises:
        AssertionError: load_balancing_strategy is not a CPLoadBalancingStrategy, or does not apply to the call.
        ValueError: Another argument cannot be used.
    """
    CPLoadBalancingStrategy.check(load_balancing_strategy)
    if deterministic or unused:
        names = ", ".join([*(["deterministic"] if deterministic else []), *sorted(unused)])
        warn_once(
            "attn_forward_func_with_cp",
            f"attn_forward_func_with_cp ignores {names}; NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 gives deterministic "
            "gradients",
        )
    window = None if window_size is None else tuple(window_size)
    heads = q.shape[-2], (q.shape[-1], v.shape[-1]), k.shape[-2]
    names = qkv_format, attn_mask_type, window, softmax_scale, float(dropout_p), softmax_type
    kind = "self" if k.shape[:-2] == q.shape[:-2] else "cross"
    layer = _layer(threading.get_ident(), *heads, *names, bool(return_max_logit), kind)
    layer.set_context_parallel_group(
        cp_group, cp_global_ranks, cp_stream, cp_comm_type, load_balancing_strategy
    )
    layer.train(is_training)
    if not fp8:
        fp8_output = False
    arguments: dict[str, Any] = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_kv": cu_seqlens_kv,
        "cu_seqlens_q_padded": cu_seqlens_q_padded,
        "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
        "pad_between_seqs": pad_between_seqs,
        "fp8_output": fp8_output,
        "core_attention_bias_type": attn_bias_type,
        "core_attention_bias": attn_bias,
    }
    if qkv_format == "thd":
        arguments |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_kv": max_seqlen_kv}
    elif "padding" not in attn_mask_type:
        arguments |= dict.fromkeys(
            ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        )
    offset = {} if softmax_offset is None else {"softmax_offset": softmax_offset.reshape(-1)}
    attended = torch.func.functional_call(layer, offset, (q, k, v), arguments)
    output, *largest = attended if isinstance(attended, tuple) else (attended,)
    output = output if fp8_output else output.unflatten(-1, (q.shape[-2], v.shape[-1]))
    return (output, *largest) if largest else output


@functools.lru_cache(maxsize=64)
def _layer(
    thread: int,
    heads: int,
    sizes: tuple[int, int],
    groups: int,
    qkv_format: TensorFormat,
    attn_mask_type: str,
    window_size: tuple[int, int] | None,
    softmax_scale: float | None,
    dropout: float,
    softmax_type: SoftmaxType,
    return_max_logit: bool,
    attention_type: AttentionType,
) -> DotProductAttention:
    """Return a DotProductAttention for the calls of one thread with these settings."""
    return DotProductAttention(
        heads,
        sizes,
        groups,
        attention_dropout=dropout,
        qkv_format=qkv_format,
        attn_mask_type=attn_mask_type,
        window_size=window_size,
        attention_type=attention_type,
        softmax_scale=softmax_scale,
        softmax_type=softmax_type,
        return_max_logit=return_max_logit,
    )
