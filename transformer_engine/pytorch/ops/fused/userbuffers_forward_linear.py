"""Alias of transformer_engine.pytorch.ops.fused.operations."""

from .operations import UserbuffersForwardLinear

__all__ = ["UserbuffersForwardLinear"]
