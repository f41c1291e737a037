"""Alias of transformer_engine.pytorch.ops.fused.operations."""

from .operations import BackwardActivationBias

__all__ = ["BackwardActivationBias"]
