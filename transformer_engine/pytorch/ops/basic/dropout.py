"""Alias of transformer_engine.pytorch.ops.basic.elementwise."""

from .elementwise import Dropout

__all__ = ["Dropout"]
