"""Softmax over attention scores and its gradient, and the shapes that fused kernels support."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from numbers import Real
from typing import Any

import jax.numpy as jnp
from jax import Array

from ...common.checks import accepts_former_keywords, member, number, whole
from ..primitives.attention.enums import AttnSoftmaxType
from ..runtime.checks import check_dtype, check_shaped, check_values
from ..softmax import SoftmaxFusionType, softmax

_THREADS, _WARP = 128, 32


def scaled_softmax_fwd(logits: Array, scale_factor: float) -> Array:
    """Compute softmax(scale_factor * logits) [b, h, q, k] over the keys, in logits' dtype."""
    return softmax(logits, None, scale_factor, SoftmaxFusionType.SCALED)


def _accept_missing_inputs(function: Callable[..., Array]) -> Callable[..., Array]:
    """Decorate a gradient, so that it accepts calls without the inputs of the forward pass, which it does not read."""
    names = [*inspect.signature(function).parameters][2:-1]

    @functools.wraps(function)
    def gradient(dz: Array, softmax_out: Array, *arguments: Any, **options: Any) -> Array:
        if len(arguments) < len(names) + 1 and all(isinstance(value, Real) for value in arguments):
            keywords = dict(zip(("scale_factor",), arguments, strict=False)) | options
            return function(dz, softmax_out, **dict.fromkeys(names) | keywords)
        return function(dz, softmax_out, *arguments, **options)

    return gradient


@_accept_missing_inputs
def scaled_softmax_bwd(
    dz: Array, softmax_out: Array, logits: Array | None, scale_factor: float
) -> Array:
    """Compute the gradient of the logits, scale_factor * p * (dz - sum(p * dz)), in softmax_out's dtype.

    Args:
        dz: Probability gradient, with softmax_out's shape.
        softmax_out: Probabilities p [b, h, q, k] from the forward pass.
        logits: Forward-pass input, which is not read; calls may leave it out.
        scale_factor: Factor in the forward pass.

    Raises:
        ValueError: The shapes of dz and softmax_out differ.
    """
    check_values("softmax_out", softmax_out)
    check_shaped("dz", dz, softmax_out.shape)
    number("scale_factor", scale_factor)
    p, dp = softmax_out.astype(jnp.float32), dz.astype(jnp.float32)
    dx = scale_factor * p * (dp - (p * dp).sum(axis=-1, keepdims=True))
    return dx.astype(softmax_out.dtype)


def scaled_masked_softmax_fwd(logits: Array, mask: Array, scale_factor: float) -> Array:
    """Compute softmax(scale_factor * logits) [b, h, q, k] over the keys whose mask is False (0).

    mask has shape [1 or b, 1 or h, q, k]; masked probabilities are exactly 0.
    """
    return softmax(logits, mask, scale_factor, SoftmaxFusionType.SCALED_MASKED)


@_accept_missing_inputs
def scaled_masked_softmax_bwd(
    dz: Array, softmax_out: Array, logits: Array | None, mask: Array | None, scale_factor: float
) -> Array:
    """Compute the gradient of the logits as `scaled_softmax_bwd`; it is 0 where the probability is 0.

    logits and mask are not read; calls may leave them out.
    """
    return scaled_softmax_bwd(dz, softmax_out, logits, scale_factor)


def scaled_upper_triang_masked_softmax_fwd(logits: Array, scale_factor: float) -> Array:
    """Compute softmax(scale_factor * logits) [b, h, q, k] for query i over the keys 0 to i."""
    return softmax(logits, None, scale_factor, SoftmaxFusionType.SCALED_UPPER_TRIANG_MASKED)


@_accept_missing_inputs
def scaled_upper_triang_masked_softmax_bwd(
    dz: Array, softmax_out: Array, logits: Array | None, scale_factor: float
) -> Array:
    """Compute the gradient of the logits as `scaled_softmax_bwd`; it is 0 where the probability is 0."""
    return scaled_softmax_bwd(dz, softmax_out, logits, scale_factor)


@accepts_former_keywords(fusion_type="softmax_fusion_type")
def is_softmax_kernel_available(
    softmax_fusion_type: SoftmaxFusionType,
    softmax_type: AttnSoftmaxType,
    batch: int,
    heads: int,
    q_seqlen: int,
    k_seqlen: int,
    dtype: Any,
) -> bool:
    """Whether a fused softmax kernel supports scores [batch, heads, q_seqlen, k_seqlen].

    The kernel has blocks of 128 threads. A warp processes two rows with up to 128 keys, or one longer row.

    Args:
        softmax_fusion_type: Scaling and masking.
        softmax_type: Denominator; the kernel supports VANILLA_SOFTMAX.
        batch: Batch size; batch * heads must be a multiple of 4.
        heads: Number of heads.
        q_seqlen: Number of queries, a multiple of 4 and of the rows per block.
        k_seqlen: Number of keys, from 16 to 16384.
        dtype: Score dtype, 16 bits wide.
    """
    member("softmax_fusion_type", softmax_fusion_type, SoftmaxFusionType)
    member("softmax_type", softmax_type, AttnSoftmaxType)
    for name, extent in (
        ("batch", batch),
        ("heads", heads),
        ("q_seqlen", q_seqlen),
        ("k_seqlen", k_seqlen),
    ):
        whole(name, extent)
    if (
        softmax_type is not AttnSoftmaxType.VANILLA_SOFTMAX
        or check_dtype("dtype", dtype).itemsize != 2
    ):
        return False
    if not 16 <= k_seqlen <= 16384 or q_seqlen % 4 or (batch * heads) % 4:
        return False
    padded = 1 << (k_seqlen - 1).bit_length()
    rows = _THREADS // min(padded, _WARP) * (2 if padded <= 128 else 1)
    return q_seqlen % rows == 0
