"""Alias of transformer_engine.pytorch.ops.basic.normalization."""

from .normalization import RMSNorm

__all__ = ["RMSNorm"]
