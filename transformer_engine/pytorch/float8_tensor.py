"""Alias of transformer_engine.pytorch.tensor.float8_tensor."""

from .tensor.float8_tensor import (
    Float8Tensor,
    Float8Quantizer,
    Float8CurrentScalingQuantizer,
)

__all__ = [
    "Float8Tensor",
    "Float8Quantizer",
    "Float8CurrentScalingQuantizer",
]
