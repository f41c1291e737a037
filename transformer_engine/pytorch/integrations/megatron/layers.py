"""Attention layers, with the constructors of Megatron-core: linear, norm and core attention.

They derive from this package's layers, read their settings from a config, and return (output, bias)
as Megatron's linear layers. QK-clip scales projection rows so that no logit exceeds a threshold.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import attention as attentions
from ...constants import AttentionType
from ...module import LayerNorm, LayerNormLinear, Linear, RMSNorm
from ...runtime.device import canonical_device
from .equivalents import (
    CrossAttentionSubmodules,
    SelfAttentionSubmodules,
    count_ranks,
    rng_tracker,
    setting,
)


def self_attention_submodules(config: Any, input_norm: bool = False) -> SelfAttentionSubmodules:
    """Return the submodules of a SelfAttention.

    Args:
        config: Settings; qk_layernorm adds query and key norms.
        input_norm: Whether the projection includes an input norm.
    """
    norm = head_norm if config.qk_layernorm else None
    qkv = NormColumnLinear if input_norm else ColumnLinear
    return SelfAttentionSubmodules(qkv, CoreAttention, RowLinear, norm, norm)


def cross_attention_submodules(config: Any) -> CrossAttentionSubmodules:
    """Return the submodules of a CrossAttention.

    Args:
        config: Attention settings.
    """
    return CrossAttentionSubmodules(ColumnLinear, ColumnLinear, CoreAttention, RowLinear)


def _arguments(
    config: Any,
    *,
    init_method: Any,
    bias: bool,
    tp_group: Any = None,
    name: str | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Convert Megatron's constructor arguments; arguments that the class determines are ignored."""
    tp_size = count_ranks(tp_group)
    return {
        "name": name,
        "bias": bias,
        "tp_group": tp_group,
        "tp_size": tp_size,
        "sequence_parallel": config.sequence_parallel and tp_size > 1,
        "params_dtype": config.params_dtype,
        "device": setting(config, "device", "cuda"),
        "init_method": init_method,
        "get_rng_state_tracker": rng_tracker(),
        "fuse_wgrad_accumulation": config.gradient_accumulation_fusion,
        "delay_wgrad_compute": config.delay_wgrad_compute,
    }


class _WithBias(torch.nn.Module):
    """forward(x) returns (y, bias); bias is None without a bias, or if y includes it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        output = super().forward(x)
        return output if isinstance(output, tuple) else (output, None)


class ColumnLinear(_WithBias, Linear):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Return (y, None) with y [.., output_size / ranks] = x @ weight.T + bias."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(
            input_size, output_size, parallel_mode="column", **_arguments(config, **options)
        )


class NormColumnLinear(_WithBias, LayerNormLinear):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Return (y, None) with y [.., output_size / ranks] = norm(x) @ weight.T + bias."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(
            input_size,
            output_size,
            eps=config.layernorm_epsilon,
            normalization=config.normalization,
            zero_centered_gamma=config.layernorm_zero_centered_gamma,
            parallel_mode="column",
            **_arguments(config, **options),
        )


class RowLinear(_WithBias, Linear):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Return (y, bias or None) with y [.., output_size] = sum over ranks of x @ weight.T; the caller adds the bias."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(
            input_size,
            output_size,
            parallel_mode="row",
            return_bias=options["bias"],
            **_arguments(config, **options),
        )


def head_norm(hidden_size: int, config: Any, eps: float) -> LayerNorm | RMSNorm:
    """Return the config's norm for x [.., hidden_size]."""
    kind = LayerNorm if config.normalization == "LayerNorm" else RMSNorm
    return kind(
        hidden_size,
        eps,
        zero_centered_gamma=config.layernorm_zero_centered_gamma,
        dtype=config.params_dtype,
        device=setting(config, "device", "cuda"),
    )


class HeadL2Norm(torch.nn.Module):
    """y [.., d] = x / sqrt(mean(x^2) + eps), computed in float32 and returned in x's dtype, without parameters."""

    def __init__(self, hidden_size: int, config: Any, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)).to(x.dtype)


_PACKED_KINDS: dict[str, str] = {"causal": "padding_causal", "no_mask": "padding"}


class CoreAttention(attentions.DotProductAttention):
    """Core attention on q, k, v [s, b, heads, size], or [t, heads, size] if packed, that returns [s, b, heads * size].

    Attributes:
        current_max_attn_logits: [heads] under qk_clip: the largest logit per head since it was last set to None.
    """

    def __init__(
        self,
        *,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: AttentionType,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
    ) -> None:
        tp_group = None if pg_collection is None else pg_collection.tp
        cp_comm_type = cp_comm_type or "p2p"
        # "a2a+p2p" takes Megatron's hierarchical groups.
        cp_group = getattr(pg_collection, "hcp" if cp_comm_type == "a2a+p2p" else "cp", None)
        super().__init__(
            config.num_attention_heads,
            config.kv_channels,
            num_gqa_groups=config.num_query_groups,
            attention_dropout=config.attention_dropout,
            qkv_format="sbhd",
            attn_mask_type=attn_mask_type.name,
            window_size=config.window_size,
            tp_size=count_ranks(tp_group),
            tp_group=tp_group,
            get_rng_state_tracker=rng_tracker(),
            layer_number=layer_number,
            attention_type=attention_type,
            cp_group=cp_group,
            cp_comm_type=cp_comm_type,
            softmax_scale=softmax_scale,
            softmax_type=config.softmax_type,
            return_max_logit=config.qk_clip,
        )
        self.current_max_attn_logits: Tensor | None = None
        self.to(canonical_device(setting(config, "device", "cuda")))

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: Any,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        kind: str = attn_mask_type.name
        options: dict[str, Any] = {}
        if packed_seq_params is not None:
            for name in (
                "qkv_format",
                "cu_seqlens_q",
                "cu_seqlens_kv",
                "cu_seqlens_q_padded",
                "cu_seqlens_kv_padded",
                "max_seqlen_q",
                "max_seqlen_kv",
            ):
                options[name] = getattr(packed_seq_params, name)
            kind = _PACKED_KINDS.get(kind, kind)
        if attention_bias is not None:
            options |= {
                "core_attention_bias_type": "post_scale_bias",
                "core_attention_bias": attention_bias,
            }
        mask = attention_mask if kind == "arbitrary" or "padding" in kind else None
        result = super().forward(query, key, value, mask, attn_mask_type=kind, **options)
        if not self.return_max_logit:
            return result  # pyright: ignore[reportReturnType]
        output, logits = result
        previous = self.current_max_attn_logits
        logits = logits.detach()
        self.current_max_attn_logits = (
            logits if previous is None else torch.maximum(previous, logits)
        )
        return output


class ProjectionHeads(NamedTuple):
    """Rows of a group in the projection's weight: queries, their gates, one key, one value, with `size` rows each."""

    groups: int
    queries: int
    gates: int
    size: int


def clip_rows(weight: Tensor, factor: Tensor, alpha: float, heads: ProjectionHeads) -> None:
    """Scale query rows by factor^alpha and key rows by factor^(1 - alpha), per group, in place (QK-clip)."""
    parts = weight.view(heads.groups, heads.queries + heads.gates + 2, heads.size, -1)
    factor = factor.to(weight.device).view(-1, 1, 1, 1)
    with torch.no_grad():
        parts[:, : heads.queries].mul_(factor.pow(alpha))
        parts[:, heads.queries + heads.gates].mul_(factor.pow(1 - alpha).squeeze(1))
