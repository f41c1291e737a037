"""Softmax: probabilities of scaled scores, with a mask, a bias and a sink."""

from __future__ import annotations

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from ...common.checks import member
from ..attention.arguments import sink_of
from ..checks import broadcasts, check_values
from ..primitives.attention.enums import AttnSoftmaxType
from ..softmax import SoftmaxFusionType, check_scores, scaled_softmax
from .base import check_call


class Softmax(nn.Module):
    """p [b, h, q, k] in the scores' dtype: softmax(scale_factor * (scores + bias)); hidden keys are exactly zero."""

    scale_factor: float = 1.0
    softmax_fusion_type: SoftmaxFusionType = SoftmaxFusionType.SCALED
    softmax_type: AttnSoftmaxType = AttnSoftmaxType.VANILLA_SOFTMAX

    @nn.compact
    def __call__(
        self,
        inputs: Array,
        mask: Array | None = None,
        bias: Array | None = None,
        softmax_offset: Array | None = None,
    ) -> Array:
        """inputs [b, h, q, k], of which a bias may have 1 in place of an extent; a mask's True hides a key;
        softmax_offset [1, h, 1, 1] of LEARNABLE_SOFTMAX.
        """
        check_call(self, inputs=inputs)
        member("softmax_type", self.softmax_type, AttnSoftmaxType)
        member("softmax_fusion_type", self.softmax_fusion_type, SoftmaxFusionType)
        check_scores(inputs, self.scale_factor)
        if bias is not None:
            check_values("bias", bias)
            if not broadcasts(bias.shape, inputs.shape):
                raise ValueError(
                    f"bias has shape {bias.shape}; it must be {inputs.shape}, or 1 in place of an extent"
                )
        sink = sink_of(self.softmax_type, softmax_offset, inputs.shape[1])
        scores = inputs if bias is None else inputs.astype(jnp.float32) + bias.astype(jnp.float32)
        masked = self.softmax_fusion_type is SoftmaxFusionType.SCALED_MASKED
        # A masked softmax without a mask is a plain one, as layers whose mask is optional rely on.
        kind = SoftmaxFusionType.SCALED if masked and mask is None else self.softmax_fusion_type
        return scaled_softmax(scores, mask, self.scale_factor, kind, sink).astype(inputs.dtype)
