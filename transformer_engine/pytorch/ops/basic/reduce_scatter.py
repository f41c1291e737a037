"""Alias of transformer_engine.pytorch.ops.basic.collectives."""

from .collectives import ReduceScatter

__all__ = ["ReduceScatter"]
