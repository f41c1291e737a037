"""Alias for transformer_engine.debug.features.disable_quantization."""

from transformer_engine.debug.features.disable_quantization import DisableFP8GEMM

__all__ = ["DisableFP8GEMM"]
