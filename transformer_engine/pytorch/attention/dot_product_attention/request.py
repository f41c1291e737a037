"""One attention call as data: what a backend reads before it says yes or no, and the tensors it then gets.

Legend: b batch, h query heads, g key and value heads (h a multiple of g), s sequence, t packed tokens, d head
size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ....common import env
from .mask import Mask

BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
QKV_FORMATS = ("sbhd", "bshd", "thd")


@dataclass(frozen=True)
class Switches:
    """The families of backends that NVTE_FLASH_ATTN, NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN leave on."""

    flash: bool = True
    fused: bool = True
    unfused: bool = True

    @classmethod
    def from_environment(cls) -> Switches:
        return cls(
            flash=bool(env.get("NVTE_FLASH_ATTN")),
            fused=bool(env.get("NVTE_FUSED_ATTN")),
            unfused=bool(env.get("NVTE_UNFUSED_ATTN")),
        )


@dataclass(frozen=True)
class AttentionRequest:
    """softmax(scale * q k^T + bias) v for b sequences; no tensor and no tensor's value is in here.

    seqlen_q, seqlen_kv  longest sequence (the padded extent)
    q_format, kv_format  sbhd, bshd or thd; they differ only when keys come from a cache
    dropout              probability that is in force (0 in evaluation)
    padded_between       thd: tokens of no sequence lie between the sequences
    """

    dtype: torch.dtype
    device_type: str
    batch: int
    heads: int
    groups: int
    seqlen_q: int
    seqlen_kv: int
    head_dim_qk: int
    head_dim_v: int
    q_format: str
    kv_format: str
    mask: Mask
    scale: float
    switches: Switches
    bias: str = "no_bias"
    softmax: str = "vanilla"
    dropout: float = 0.0
    padded_between: bool = False
    max_logit: bool = False
    needs_gradient: bool = True
    deterministic: bool = False


class AttentionInputs(NamedTuple):
    """The tensors of one call.

    q [.., h, d_qk], k [.., g, d_qk], v [.., g, d_v] in request.q_format and request.kv_format
    lengths_*  [b] int32 tokens of each sequence;  starts_*  [b + 1] int32 where each begins in a thd tensor
    masked_*   [b, 1, 1, s] padding masks;  masked  arbitrary mask, broadcastable to [b, h, s_q, s_kv]
    bias       broadcastable to [b, h, s_q, s_kv];  slopes  float32 [h] or [b, h] of ALiBi
    sink       float32 [h]: the logit of a key without a value
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lengths_q: Tensor | None = None
    lengths_kv: Tensor | None = None
    starts_q: Tensor | None = None
    starts_kv: Tensor | None = None
    masked_q: Tensor | None = None
    masked_kv: Tensor | None = None
    masked: Tensor | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None
    sink: Tensor | None = None


class AttentionResult(NamedTuple):
    """output [.., h * d_v] in request.q_format; max_logit float32 [h], when the request asks for it."""

    output: Tensor
    max_logit: Tensor | None = None
