"""What an attention is told: the settings of its layer, those of one call, and what checks read of a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...module.base import ModuleConfig
from ...primitives.attention.mask import canonical_name
from ...runtime.tracing import number_while_tracing, text_of_number
from ..inference import InferenceParams


@dataclass(frozen=True, eq=False)
class AttentionConfig(ModuleConfig):
    """The settings of a DotProductAttention, as their names in its constructor say.

    attn_mask_type   in its one spelling
    window_size      as given: what the name of a mask makes of it is found in each call
    softmax_scale, attention_dropout   with their texts, for a tracing compiler
    """

    num_attention_heads: int = 1
    num_gqa_groups: int = 1
    num_gqa_groups_per_partition: int = 1
    head_dim_qk: int = 1
    head_dim_v: int = 1
    attention_dropout: float = 0.0
    qkv_format: str = "sbhd"
    attn_mask_type: str = "causal"
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool | None = None
    layer_number: int | None = None
    attention_type: str = "self"
    softmax_scale: float = 1.0
    softmax_type: str = "vanilla"
    return_max_logit: bool = False
    _scale_text: str = field(init=False, default="")
    _dropout_text: str = field(init=False, default="")

    def __post_init__(self) -> None:
        derived = {
            "attn_mask_type": canonical_name(self.attn_mask_type),
            "_scale_text": text_of_number(self.softmax_scale),
            "_dropout_text": text_of_number(self.attention_dropout),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def heads(self) -> int:
        """Query heads of this tensor-parallel rank."""
        return self.num_attention_heads // self.tp_size

    def numbers(self, training: bool) -> Numbers:
        """The settings that are no whole numbers, in training or evaluation."""
        return Numbers(self.softmax_scale, self.attention_dropout if training else 0.0)

    def numbers_when_traced(self, training: bool) -> Numbers:
        """The same as constants of a graph, whose compiler would make symbols of them."""
        dropout = number_while_tracing(self._dropout_text) if training else 0.0
        return Numbers(number_while_tracing(self._scale_text), dropout)


class Numbers(NamedTuple):
    """dropout: the probability that is in force."""

    scale: float
    dropout: float


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

    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def is_cuda(self) -> bool:
        """Is it on a GPU?"""
        return self.device.type == "cuda"


def described_of(x: Tensor) -> Described:
    """What checks read of a tensor that is there."""
    return Described(x.shape, x.dtype, x.device, x.requires_grad)


def is_tensor(x: object) -> bool:
    """Is it a tensor, or the description of one?"""
    return isinstance(x, (Tensor, Described))


def is_pair(mask: object) -> bool:
    """Are these masks of queries and of keys, rather than one mask or its description?"""
    return isinstance(mask, tuple) and not isinstance(mask, Described)
