"""What an attention is told: the settings of its layer, those of one call, and what checks read of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..inference import InferenceParams


class Config(NamedTuple):
    """The settings of a DotProductAttention; a change of one is another config.

    heads, groups   of this tensor-parallel rank;  all_heads  of all ranks
    window          as given: what the name of a mask makes of it is found in each call
    """

    heads: int
    groups: int
    all_heads: int
    head_dim_qk: int
    head_dim_v: int
    qkv_format: str
    attn_mask_type: str
    window: tuple[int, int] | None
    bottom_right_diagonal: bool | None
    attention_type: str
    softmax_type: str
    softmax_scale: float
    dropout: float
    max_logit: bool
    layer_number: int | None
    tp_group: Any
    training: bool

    @classmethod
    def of(cls, layer: Any, scale: float, dropout: float) -> Config:
        """The config of a DotProductAttention whose softmax_scale and attention_dropout are these numbers."""
        return cls(
            layer.heads,
            layer.num_gqa_groups_per_partition,
            layer.num_attention_heads,
            layer.head_dim_qk,
            layer.head_dim_v,
            layer.qkv_format,
            layer.attn_mask_type,
            layer.given_window,
            layer.bottom_right_diagonal,
            layer.attention_type,
            layer.softmax_type,
            scale,
            dropout,
            layer.return_max_logit,
            layer.layer_number,
            layer.tp_group,
            layer.training,
        )


class CallArguments(NamedTuple):
    """The arguments of DotProductAttention.forward that say what is attended to; pairs are of queries and keys."""

    attention_mask: Tensor | tuple[Tensor, Tensor] | None = None
    qkv_format: str | None = None
    cu_seqlens: tuple[Tensor | None, Tensor | None] = (None, None)
    cu_seqlens_padded: tuple[Tensor | None, Tensor | None] = (None, None)
    max_seqlens: tuple[int | None, int | None] = (None, None)
    attn_mask_type: str | None = None
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool | None = None
    bias_type: str = "no_bias"
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    inference_params: InferenceParams | None = None
    pad_between_seqs: bool | None = None
    num_splits: int | None = 1
    score_mod: Callable[..., Tensor] | None = None

    def as_keywords(self) -> dict[str, Any]:
        """The keywords of DotProductAttention.forward that say what MultiheadAttention.forward can be given."""
        return {
            "cu_seqlens_q": self.cu_seqlens[0],
            "cu_seqlens_kv": self.cu_seqlens[1],
            "cu_seqlens_q_padded": self.cu_seqlens_padded[0],
            "cu_seqlens_kv_padded": self.cu_seqlens_padded[1],
            "max_seqlen_q": self.max_seqlens[0],
            "max_seqlen_kv": self.max_seqlens[1],
            "attention_mask": self.attention_mask,
            "attn_mask_type": self.attn_mask_type,
            "window_size": self.window_size,
            "bottom_right_diagonal": self.bottom_right_diagonal,
            "core_attention_bias_type": self.bias_type,
            "core_attention_bias": self.bias,
            "alibi_slopes": self.alibi_slopes,
            "inference_params": self.inference_params,
            "pad_between_seqs": self.pad_between_seqs,
        }


NOTHING_GIVEN = CallArguments()


class Described(NamedTuple):
    """A tensor that is not there yet: what checks read of it."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    @property
    def is_cuda(self) -> bool:
        """Is it on a GPU?"""
        return self.device.type == "cuda"
