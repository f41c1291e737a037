"""Alias of transformer_engine.pytorch.ops.fused.operations."""

from .operations import BackwardLinearScale

__all__ = ["BackwardLinearScale"]
