"""transformer_engine_torch: the flat names that callers of the original's extension module use."""

from transformer_engine.pytorch.constants import DType

__all__ = ["DType"]
