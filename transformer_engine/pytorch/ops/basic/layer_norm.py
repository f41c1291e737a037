"""Alias of transformer_engine.pytorch.ops.basic.normalization."""

from .normalization import LayerNorm

__all__ = ["LayerNorm"]
