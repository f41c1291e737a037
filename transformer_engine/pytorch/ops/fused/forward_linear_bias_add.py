"""Alias of transformer_engine.pytorch.ops.fused.operations."""

from .operations import ForwardLinearBiasAdd

__all__ = ["ForwardLinearBiasAdd"]
