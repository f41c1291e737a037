"""Alias of transformer_engine.pytorch.ops.basic.elementwise."""

from .elementwise import Identity

__all__ = ["Identity"]
