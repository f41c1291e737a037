"""Alias of transformer_engine.pytorch.ops.basic.elementwise."""

from .elementwise import Quantize

__all__ = ["Quantize"]
