"""Alias of transformer_engine.pytorch.ops.basic.activation."""

from .activation import ClampedSwiGLU, SwiGLU

__all__ = ["ClampedSwiGLU", "SwiGLU"]
