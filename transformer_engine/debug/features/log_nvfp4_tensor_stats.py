"""Alias for transformer_engine.debug.features.log_fp8_tensor_stats."""

from transformer_engine.debug.features.log_fp8_tensor_stats import LogNvfp4TensorStats

__all__ = ["LogNvfp4TensorStats"]
