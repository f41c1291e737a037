"""Alias of transformer_engine.pytorch.ops.basic.collectives."""

from .collectives import AllReduce

__all__ = ["AllReduce"]
