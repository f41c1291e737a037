"""What all libraries of the FlashAttention kind refuse, in the same words."""

from __future__ import annotations

from ..request import AttentionRequest


def refuses_beyond_flash(
    r: AttentionRequest,
    largest_head: int,
    *,
    multiple: int = 8,
    alibi: bool = False,
    sink: bool = False,
    dropout: bool = False,
) -> str | None:
    """Why a kernel for masks of bands and lengths on CUDA cannot take the request; None if it can."""
    if r.device_type != "cuda":
        return f"it needs a CUDA device, the tensors are on {r.device_type}"
    if r.fp8 is not None:
        return "FP8 attention; it takes float16 and bfloat16"
    if str(r.dtype) not in ("torch.float16", "torch.bfloat16"):
        return f"the tensors are {r.dtype}; it takes float16 and bfloat16"
    if r.empty:
        return "an empty tensor"
    if r.score_mod is not None:
        return "score_mod; it has no hook for it"
    if r.bias != "no_bias" and not (alibi and r.bias == "alibi"):
        return f"core_attention_bias_type={r.bias!r}; it takes no bias"
    if r.softmax != "vanilla" and not sink:
        return f"softmax_type={r.softmax!r}; it has no sink"
    if r.max_logit:
        return "return_max_logit; it keeps its logits to itself"
    if r.dropout > 0.0 and not dropout:
        return f"attention_dropout={r.dropout}; it has no dropout"
    if r.mask.arbitrary:
        return "attn_mask_type='arbitrary'; it takes bands and lengths, no mask tensors"
    if r.padding_tensors:
        return "padding given as mask tensors; give cu_seqlens_q and cu_seqlens_kv"
    for name, size in (("queries and keys", r.head_dim_qk), ("values", r.head_dim_v)):
        if size > largest_head or size % multiple:
            return f"heads of {name} have size {size}; it takes multiples of {multiple} up to {largest_head}"
    return None


def refuses_loose_sequences(r: AttentionRequest) -> str | None:
    """Why a function for dense or closely packed sequences cannot take the request; None if it can."""
    if r.head_dim_qk != r.head_dim_v:
        return f"heads of two sizes, {r.head_dim_qk} and {r.head_dim_v}"
    if r.q_format != r.kv_format or r.page_size:
        return "a cache of keys and values; it is not called for one"
    if r.mask.padding and not r.packed:
        return f"padding with qkv_format={r.q_format!r}; it takes lengths with 'thd' only"
    if r.padded_between:
        return "padding between packed sequences; pack them closely"
    return None


def refuses_top_left(r: AttentionRequest) -> str | None:
    """Why a kernel whose diagonal ends in the last query and key cannot take the request; None if it can."""
    if r.ends_aligned:
        return None
    return (
        "the diagonal begins top left and lengths of queries and keys may differ; its diagonal ends bottom "
        "right (give one cu_seqlens tensor for both where they are the same)"
    )
