"""Alias of transformer_engine.pytorch.ops.basic.elementwise."""

from .elementwise import ConstantScale

__all__ = ["ConstantScale"]
