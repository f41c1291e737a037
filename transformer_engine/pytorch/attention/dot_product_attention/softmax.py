"""Softmax over attention scores with a scale, a mask or a causal mask, under the class names of NVIDIA's engine.

Each class has one method, `apply`, as an autograd function has; the gradient reaches the scores alone.
"""

from __future__ import annotations

from torch import Tensor

from ...functions.softmax import scaled_softmax
from ...module.softmax import FusedScaleMaskSoftmax

__all__ = [
    "FusedScaleMaskSoftmax",
    "ScaledAlignedCausalMaskedSoftmax",
    "ScaledMaskedSoftmax",
    "ScaledSoftmax",
    "ScaledUpperTriangMaskedSoftmax",
]


class ScaledSoftmax:
    """y = softmax(scale * x) over the keys."""

    @staticmethod
    def apply(inputs: Tensor, scale: float) -> Tensor:
        """Compute probabilities from scores [..., q, k]."""
        return scaled_softmax(inputs, scale)


class ScaledMaskedSoftmax:
    """y = softmax(scale * x) over the keys that a mask leaves visible."""

    @staticmethod
    def apply(inputs: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Compute probabilities from scores [b, h, q, k].

        Args:
            inputs: Scores.
            mask: bool or uint8, nonzero where a key is hidden, broadcastable to the scores; None hides no key.
            scale: Score factor.
        """
        return scaled_softmax(inputs, scale, mask)


class ScaledUpperTriangMaskedSoftmax:
    """y = softmax(scale * x) over the keys up to the query's own position."""

    @staticmethod
    def apply(inputs: Tensor, scale: float) -> Tensor:
        """Compute probabilities from scores [..., s, s]."""
        return scaled_softmax(inputs, scale, None, "top_left")


class ScaledAlignedCausalMaskedSoftmax:
    """y = softmax(scale * x) under a causal mask whose diagonal ends at the last query and the last key."""

    @staticmethod
    def apply(inputs: Tensor, scale: float) -> Tensor:
        """Compute probabilities from scores [..., q, k]."""
        return scaled_softmax(inputs, scale, None, "bottom_right")
