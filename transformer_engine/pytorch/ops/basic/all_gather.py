"""Alias of transformer_engine.pytorch.ops.basic.collectives."""

from .collectives import AllGather

__all__ = ["AllGather"]
