"""One attention call as data: what a backend reads before it says yes or no, and the tensors it then gets.

Legend: b batch, h query heads, g key and value heads (h a multiple of g), s sequence, t packed tokens, d head
size.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """The families of backends that the environment leaves on; fused_kind: NVTE_FUSED_ATTN_BACKEND."""

    flash: bool = True
    fused: bool = True
    unfused: bool = True
    flash2: bool = True
    flash3: bool = True
    flash4: bool = True
    fused_kind: str | None = None

    @classmethod
    def from_environment(cls) -> Switches:
        """The switches as the NVTE_* variables are."""
        return cls(
            flash=bool(env.get("NVTE_FLASH_ATTN")),
            fused=bool(env.get("NVTE_FUSED_ATTN")),
            unfused=bool(env.get("NVTE_UNFUSED_ATTN")),
            flash2=bool(env.get("NVTE_FLASH_ATTN_V2")),
            flash3=bool(env.get("NVTE_FLASH_ATTN_V3")),
            flash4=bool(env.get("NVTE_FLASH_ATTN_V4")),
            fused_kind=env.get("NVTE_FUSED_ATTN_BACKEND"),  # pyright: ignore[reportArgumentType]
        )


@dataclass(frozen=True)
class AttentionRequest:
    """softmax(scale * q k^T + bias) v for b sequences; no tensor and no tensor's value is in here.

    seqlen_q, seqlen_kv  longest sequence (the padded extent)
    q_format, kv_format  sbhd, bshd or thd; they differ only when keys come from a cache
    dropout              probability that is in force (0 in evaluation)
    padded_between       thd: tokens of no sequence lie between the sequences
    capability           compute capability of the device, (0, 0) on a CPU
    bias_shape           of the bias [1 | b, 1 | h, 1 | s_q, 1 | s_kv]; bias_gradient: its gradient is wanted
    slopes_shape         of ALiBi's slopes, (h,) or (b, h); slopes_given: they are not the usual ones
    masked_shape         of the arbitrary mask
    padding_tensors      padding came as mask tensors, which need not hide a suffix
    same_lengths         queries and keys have the same lengths, sequence by sequence
    page_size            > 0: keys and values lie in pages of so many tokens
    num_splits           parts that a sequence of keys is computed in; 0: as many as the backend likes
    cached               keys come from a cache of earlier steps
    fp8                  kind of FP8 attention; None: tensors are used in their own dtype
    score_mod            score_mod(score, b, h, i, j) -> score, applied to scale * q k^T
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
    capability: tuple[int, int] = (0, 0)
    bias_shape: tuple[int, ...] | None = None
    bias_gradient: bool = False
    slopes_shape: tuple[int, ...] | None = None
    slopes_given: bool = False
    masked_shape: tuple[int, ...] | None = None
    padding_tensors: bool = False
    same_lengths: bool = False
    page_size: int = 0
    num_splits: int = 1
    cached: bool = False
    fp8: str | None = None
    score_mod: Callable[..., Tensor] | None = None

    @property
    def packed(self) -> bool:
        """Are tokens of all sequences in one axis?"""
        return self.q_format == "thd"

    @property
    def empty(self) -> bool:
        """Is a size 0?"""
        return 0 in (self.batch, self.seqlen_q, self.seqlen_kv)

    @property
    def diagonal(self) -> bool:
        """Does it matter which keys lie on the diagonal?"""
        return self.mask.banded or self.bias == "alibi"

    @property
    def square(self) -> bool:
        """Are there as many keys as queries in every sequence, as far as the request tells?"""
        return self.same_lengths or (not self.mask.padding and self.seqlen_q == self.seqlen_kv)

    @property
    def ends_aligned(self) -> bool:
        """Does the diagonal, where it matters, end in the last query and key of every sequence?"""
        return self.mask.bottom_right or not self.diagonal or self.square

    @property
    def starts_aligned(self) -> bool:
        """Does the diagonal, where it matters, begin in the first query and key of every sequence?"""
        return not (self.mask.bottom_right and self.diagonal) or self.square


class AttentionInputs(NamedTuple):
    """The tensors of one call.

    q [.., h, d_qk], k [.., g, d_qk], v [.., g, d_v] in request.q_format and request.kv_format
    lengths_*  [b] int32 tokens of each sequence;  starts_*  [b + 1] int32 where each begins in a thd tensor
    masked_*   [b, 1, 1, s] padding masks;  masked  arbitrary mask, broadcastable to [b, h, s_q, s_kv]
    bias       broadcastable to [b, h, s_q, s_kv];  slopes  float32 [h] or [b, h] of ALiBi
    sink       float32 [h]: the logit of a key without a value
    page_table int32 [b, pages]: page of token j is page_table[b, j // page_size]; k, v [pages, page_size, g, d]
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
    page_table: Tensor | None = None


class Attended(NamedTuple):
    """What a backend's forward returns.

    output     [.., h, d_v] in request.q_format, contiguous
    lse        float32, natural logarithm of the softmax's denominator, sink included: [b, h, s_q], thd [h, t];
               -inf where a query sees no key. None is allowed when no gradient is needed
    rng_state  int64 [2] (seed, offset) on the device, when there is dropout
    max_logit  float32 [h], the largest visible scale * q k^T + bias, when the request asks for it
    """

    output: Tensor
    lse: Tensor | None = None
    rng_state: Tensor | None = None
    max_logit: Tensor | None = None


class Gradients(NamedTuple):
    """What a backend's backward returns: each in the shape and dtype of its input."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    sink: Tensor | None = None


class AttentionResult(NamedTuple):
    """output [.., h * d_v] in request.q_format; max_logit float32 [h], when the request asks for it."""

    output: Tensor
    max_logit: Tensor | None = None
