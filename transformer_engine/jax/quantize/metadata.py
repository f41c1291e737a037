"""Alias for transformer_engine.jax.quantize.factory under the original's path: quantizer states."""

from .factory import QuantizeMeta, QuantizeMetaSet

__all__ = ["QuantizeMeta", "QuantizeMetaSet"]
