"""Alias for transformer_engine.jax.quantize.quantizers under NVIDIA's path, with factories and groups."""

from .factory import QuantizerFactory
from .grouped import GroupedQuantizer
from .quantizers import (
    BlockScaleQuantizer,
    CurrentScaleQuantizer,
    DelayedScaleQuantizer,
    NVFP4Quantizer,
    Quantizer,
    QuantizerSet,
    noop_quantizer_set,
)
from .settings import compute_scale_from_amax

__all__ = [
    "BlockScaleQuantizer",
    "CurrentScaleQuantizer",
    "DelayedScaleQuantizer",
    "GroupedQuantizer",
    "NVFP4Quantizer",
    "Quantizer",
    "QuantizerFactory",
    "QuantizerSet",
    "compute_scale_from_amax",
    "noop_quantizer_set",
]
