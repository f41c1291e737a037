"""Alias of transformer_engine.pytorch.ops.basic.extra_tensors."""

from .extra_tensors import MakeExtraOutput

__all__ = ["MakeExtraOutput"]
