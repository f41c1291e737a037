"""Alias of transformer_engine.pytorch.ops.fused.operations."""

from .operations import UserbuffersBackwardLinear

__all__ = ["UserbuffersBackwardLinear"]
