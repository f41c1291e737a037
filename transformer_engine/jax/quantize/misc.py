"""Alias for transformer_engine.jax.quantize.scaling_modes under NVIDIA's path: the stored directions."""

from .scaling_modes import QuantizeLayout

__all__ = ["QuantizeLayout"]
