"""Alias of transformer_engine.pytorch.ops.fused.operations."""

from .operations import ForwardLinearScaleAdd

__all__ = ["ForwardLinearScaleAdd"]
