"""p = softmax(scale * logits), optionally with a hidden-key mask or a causal mask."""

from __future__ import annotations

import enum

import jax.numpy as jnp
from jax import Array

from ..common.checks import member, number
from ..common.warning import warn_once
from .primitives.softmax import masked_softmax
from .runtime.checks import check_mask, check_values

__all__ = ["SoftmaxFusionType", "softmax"]


class SoftmaxFusionType(enum.Enum):
    """The operations that are fused with the softmax."""

    SCALED = "scaled"
    SCALED_MASKED = "scaled_masked"
    SCALED_UPPER_TRIANG_MASKED = "scaled_upper_triang_masked"


def softmax(
    logits: Array,
    mask: Array | None = None,
    scale_factor: float = 1.0,
    softmax_fusion_type: SoftmaxFusionType = SoftmaxFusionType.SCALED,
) -> Array:
    """Compute probabilities from logits [b, h, q, k] in their dtype; hidden keys get exactly zero.

    Args:
        logits: Scores [b, h, q, k].
        mask: Mask [1 or b, 1 or h, q, k] for SCALED_MASKED, where True hides a key. Other types warn and ignore it.
        scale_factor: Factor of the scores.
        softmax_fusion_type: Type; SCALED_UPPER_TRIANG_MASKED hides keys after the query.
    """
    check_values("logits", logits)
    return scaled_softmax(logits, mask, scale_factor, softmax_fusion_type, None).astype(
        logits.dtype
    )


def check_scores(logits: Array, scale_factor: float) -> None:
    """Raise TypeError or ValueError unless logits are [b, h, q, k] and the scale is a number."""
    number("scale_factor", scale_factor)
    if logits.ndim != 4:
        raise ValueError(f"logits have shape {logits.shape}; give [b, h, q, k]")


def scaled_softmax(
    logits: Array,
    mask: Array | None,
    scale_factor: float,
    softmax_fusion_type: SoftmaxFusionType,
    sink: Array | None,
) -> Array:
    """Compute `softmax` in float32, with a sink."""
    member("softmax_fusion_type", softmax_fusion_type, SoftmaxFusionType)
    check_scores(logits, scale_factor)
    if softmax_fusion_type is SoftmaxFusionType.SCALED_MASKED:
        if mask is None:
            raise ValueError(
                "softmax_fusion_type=SCALED_MASKED and mask=None; give a mask, or use SCALED"
            )
        check_mask(mask, logits.shape)
    elif mask is not None:
        warn_once(
            "softmax: mask",
            f"a mask was given with softmax_fusion_type={softmax_fusion_type.name}, which does not read it; give "
            "SCALED_MASKED to hide the keys where the mask is True",
            stacklevel=4,
        )
        mask = None
    hidden = None if mask is None else mask.astype(bool)
    if softmax_fusion_type is SoftmaxFusionType.SCALED_UPPER_TRIANG_MASKED:
        queries, keys = logits.shape[-2:]
        hidden = jnp.arange(keys)[None, :] > jnp.arange(queries)[:, None]
    return masked_softmax(logits.astype(jnp.float32) * scale_factor, hidden, sink)
