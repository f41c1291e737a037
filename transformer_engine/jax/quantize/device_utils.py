"""Alias for transformer_engine.jax.quantize.config under NVIDIA's path: device queries."""

from .config import get_device_compute_capability, is_fp8_gemm_with_all_layouts_supported

__all__ = ["get_device_compute_capability", "is_fp8_gemm_with_all_layouts_supported"]
