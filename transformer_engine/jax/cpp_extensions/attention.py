"""Queries of fused attention, and the arguments of a score_mod as one record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax import Array

from ..attention import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout, is_fused_attn_kernel_available
from ..primitives.attention.score_mod import check_functions
from .base import BasePrimitive

__all__ = ["FusedAttnFwdPrimitive", "FusedAttnHelper", "ScoreModConfig", "make_fused_attn_score_mod_config"]

_F16, _NONE = 1, -1  # members of NVTE_Fused_Attn_Backend


class FusedAttnFwdPrimitive(BasePrimitive):
    """Switch of the kernels of attention."""


@dataclass(frozen=True)
class FusedAttnHelper:
    """Properties of an attention call that determine its backend."""

    is_training: bool
    q_dtype: Any
    kv_dtype: Any
    qkv_layout: QKVLayout
    attn_bias_type: AttnBiasType
    attn_mask_type: AttnMaskType
    softmax_type: AttnSoftmaxType
    dropout_probability: float
    q_num_heads: int
    kv_num_heads: int
    q_max_seqlen: int
    kv_max_seqlen: int
    head_dim_qk: int
    head_dim_v: int
    window_size: tuple[int, int] = (-1, -1)

    def is_fused_attn_kernel_available(self) -> bool:
        """Return whether a backend other than the reference supports the call on this machine."""
        return is_fused_attn_kernel_available(**vars(self))

    def get_fused_attn_backend(self) -> int:
        """Return the member of NVTE_Fused_Attn_Backend as an integer: 16-bit attention, or no backend."""
        return _F16 if self.is_fused_attn_kernel_available() else _NONE


@dataclass(frozen=True)
class ScoreModConfig:
    """A score_mod with its tensors; the fields have the names of the arguments of `fused_attn`."""

    score_mod: Callable[..., Array] | None = None
    score_mod_bprop: Callable[..., Array] | None = None
    score_mod_tensors: Any = None
    score_mod_bprop_tensors: Any = None


def make_fused_attn_score_mod_config(
    score_mod: Callable[..., Array] | None,
    score_mod_bprop: Callable[..., Array] | None = None,
    score_mod_tensors: Any = None,
    score_mod_bprop_tensors: Any = None,
) -> ScoreModConfig:
    """Return the four arguments as one record, for `fused_attn(..., **vars(config))`.

    Args:
        score_mod: Function that changes the logits, or None.
        score_mod_bprop: Its gradient, or None.
        score_mod_tensors: Arrays that `score_mod` reads.
        score_mod_bprop_tensors: Arrays that `score_mod_bprop` reads.
    """
    check_functions(score_mod, score_mod_bprop, score_mod_tensors, score_mod_bprop_tensors)
    return ScoreModConfig(score_mod, score_mod_bprop, score_mod_tensors, score_mod_bprop_tensors)
