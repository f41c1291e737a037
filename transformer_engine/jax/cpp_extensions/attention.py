"""The two halves of fused attention, backend queries, and score_mod arguments as one record."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

from ...common.checks import described
from ..attention import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    QKVLayout,
    is_fused_attn_kernel_available,
)
from ..attention.fused import fused_attn
from ..primitives.attention.descriptor import SequenceDescriptor
from ..primitives.attention.score_mod import check_functions
from ..runtime.checks import check_shaped
from .base import BasePrimitive

__all__ = [
    "FusedAttnFwdPrimitive",
    "FusedAttnHelper",
    "ScoreModConfig",
    "fused_attn_bwd",
    "fused_attn_fwd",
    "make_fused_attn_score_mod_config",
]

_F16, _NONE = 1, -1  # NVTE_Fused_Attn_Backend members


class FusedAttnFwdPrimitive(BasePrimitive):
    """Switch for attention kernels."""


@dataclass(frozen=True)
class FusedAttnHelper:
    """Attention call properties that determine its backend."""

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
        """Whether a backend other than the reference supports the call on this machine."""
        return is_fused_attn_kernel_available(**vars(self))

    def get_fused_attn_backend(self) -> int:
        """NVTE_Fused_Attn_Backend member as an integer: 16-bit attention, or no backend."""
        return _F16 if self.is_fused_attn_kernel_available() else _NONE


@dataclass(frozen=True)
class ScoreModConfig:
    """A score_mod with its tensors; the fields are named like `fused_attn`'s arguments."""

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
    """Pack the four arguments into one record, for `fused_attn(..., **vars(config))`.

    Args:
        score_mod: Function that changes the logits, or None.
        score_mod_bprop: Its gradient, or None.
        score_mod_tensors: Arrays that `score_mod` reads.
        score_mod_bprop_tensors: Arrays that `score_mod_bprop` reads.
    """
    check_functions(score_mod, score_mod_bprop, score_mod_tensors, score_mod_bprop_tensors)
    return ScoreModConfig(score_mod, score_mod_bprop, score_mod_tensors, score_mod_bprop_tensors)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["pullback"], meta_fields=[])
@dataclass(frozen=True)
class _SoftmaxAux:
    """Saved arrays of the forward half: the function that `jax.vjp` returned, which is a pytree."""

    pullback: Any


def fused_attn_fwd(
    qkv: tuple[Array, ...],
    bias: Array | None,
    sequence_descriptor: SequenceDescriptor | Array | None,
    seed: Array | None,
    *arguments: Any,
    **options: Any,
) -> tuple[Array, Any, Array | None, Array | None]:
    """Compute attention and the arrays that `fused_attn_bwd` needs, as the forward half of a derivative rule.

    Args:
        qkv: One, two or three arrays, as in `fused_attn`.
        bias: Bias, or None.
        sequence_descriptor: Packed sequences, a mask, or None.
        seed: jax.random key for dropout.
        arguments: Further `fused_attn` arguments.
        options: `fused_attn` keyword arguments.

    Returns:
        The output [b, q, h, dv]; softmax_aux, a saved-array pytree, which may be a jax.custom_vjp residual or a jax.jit
        result; the seed; and the largest logits [h] with return_max_logit=True, otherwise None.
    """
    bound = inspect.signature(fused_attn).bind(
        qkv, bias, sequence_descriptor, seed, *arguments, **options
    )
    call = bound.arguments

    def attend(
        qkv: tuple[Array, ...], bias: Array | None, softmax_offset: Array | None
    ) -> tuple[Array, Any]:
        result = fused_attn(**{**call, "qkv": qkv, "bias": bias, "softmax_offset": softmax_offset})
        return result if call.get("return_max_logit") else (result, None)

    offset = call.get("softmax_offset")
    output, pullback, max_logit = jax.vjp(attend, qkv, bias, offset, has_aux=True)
    return output, _SoftmaxAux(pullback), seed, max_logit


def fused_attn_bwd(
    qkv: tuple[Array, ...],
    bias: Array | None,
    softmax_aux: Any,
    rng_state: Array | None,
    output: Array,
    doutput: Array,
    *arguments: Any,
    **options: Any,
) -> tuple[tuple[Array, ...], Array | None, Array | None]:
    """Compute the gradients for `fused_attn_fwd` from its saved arrays.

    Only softmax_aux and doutput are read, because softmax_aux holds the other arguments of the forward half.

    Args:
        qkv: The arrays of the forward half.
        bias: The bias of the forward half, or None.
        softmax_aux: The second result from `fused_attn_fwd`.
        rng_state: The third result from `fused_attn_fwd`.
        output: The first result from `fused_attn_fwd`.
        doutput: Output gradient, [b, q, h, dv].
        arguments: Further arguments of the forward half.
        options: Keyword arguments of the forward half.

    Returns:
        Gradients for qkv, bias and softmax_offset; None for an array that was not passed.

    Raises:
        TypeError: softmax_aux does not come from `fused_attn_fwd`.
        ValueError: doutput does not have the shape of output.
    """
    if not isinstance(softmax_aux, _SoftmaxAux):
        raise TypeError(
            f"softmax_aux={described(softmax_aux)} is not a result of fused_attn_fwd; pass its second result"
        )
    check_shaped("doutput", doutput, output.shape)
    return softmax_aux.pullback(doutput.astype(output.dtype))
