"""Alias of transformer_engine.pytorch.tensor.quantized_tensor and .quantizer."""

from .tensor.quantized_tensor import (
    QuantizedTensor,
    QuantizedTensorStorage,
    prepare_for_saving,
    restore_from_func_ctx,
    restore_from_saved,
)
from .tensor.quantizer import Quantizer

__all__ = [
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "prepare_for_saving",
    "restore_from_func_ctx",
    "restore_from_saved",
]
