"""Alias of transformer_engine.pytorch.ops.fused.operations."""

from .operations import BackwardAddRMSNorm

__all__ = ["BackwardAddRMSNorm"]
