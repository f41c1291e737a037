"""Alias of transformer_engine.pytorch.ops.fused.operations."""

from .operations import ForwardLinearBiasActivation

__all__ = ["ForwardLinearBiasActivation"]
