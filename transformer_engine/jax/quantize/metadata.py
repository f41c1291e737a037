"""Alias for transformer_engine.jax.quantize.factory under NVIDIA's path: quantizer states."""

from .factory import QuantizeMeta, QuantizeMetaSet

__all__ = ["QuantizeMeta", "QuantizeMetaSet"]
