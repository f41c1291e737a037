"""Alias for transformer_engine.debug.features.fake_quant."""

from transformer_engine.debug.features.fake_quant import PerTensorScaling, per_tensor_cast

__all__ = ["PerTensorScaling", "per_tensor_cast"]
