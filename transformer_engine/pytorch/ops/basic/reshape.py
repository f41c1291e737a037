"""Alias of transformer_engine.pytorch.ops.basic.elementwise."""

from .elementwise import Reshape

__all__ = ["Reshape"]
