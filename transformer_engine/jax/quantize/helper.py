"""Alias of transformer_engine.jax.quantize: names under the path of former releases."""

from ...common.dtypes import DType
from .config import (
    autocast,
    fp8_autocast,
    get_device_compute_capability,
    get_global_quantize_recipe,
    get_quantization_recipe,
    get_quantize_config_with_recipe,
    get_supported_quantization_recipes,
    get_supported_scaling_modes,
    is_fp8_available,
    is_quantize_recipe_supported,
    is_scaling_mode_supported,
    update_collections,
)
from .hadamard import apply_rht
from .recipes import format_dtypes as _format2dtypes
from .scaling_modes import AmaxComputeAlgo, TensorSource

__all__ = [
    "AmaxComputeAlgo",
    "DType",
    "TensorSource",
    "_format2dtypes",
    "apply_rht",
    "autocast",
    "fp8_autocast",
    "get_device_compute_capability",
    "get_global_quantize_recipe",
    "get_quantization_recipe",
    "get_quantize_config_with_recipe",
    "get_supported_quantization_recipes",
    "get_supported_scaling_modes",
    "is_fp8_available",
    "is_quantize_recipe_supported",
    "is_scaling_mode_supported",
    "update_collections",
]
