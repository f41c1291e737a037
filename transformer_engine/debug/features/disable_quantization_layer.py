"""Alias for transformer_engine.debug.features.disable_quantization."""

from transformer_engine.debug.features.disable_quantization import DisableQuantizationLayer

__all__ = ["DisableQuantizationLayer"]
