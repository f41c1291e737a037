"""Alias of transformer_engine.pytorch.ops.fused.operations."""

from .operations import BackwardLinearAdd

__all__ = ["BackwardLinearAdd"]
