"""Alias for transformer_engine.jax.quantize.config under NVIDIA's path."""

from ...common.enums import DType
from .config import (
    NVTE_FP8_COLLECTION_NAME,
    QuantizeConfig,
    autocast,
    fp8_autocast,
    get_device_compute_capability,
    get_global_quantize_recipe,
    get_quantization_recipe,
    get_quantize_config,
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
from .scale_padding import apply_padding_to_scale_inv, remove_padding_from_scale_inv
from .scaling_modes import AmaxComputeAlgo, TensorSource

__all__ = [
    "NVTE_FP8_COLLECTION_NAME",
    "AmaxComputeAlgo",
    "DType",
    "QuantizeConfig",
    "TensorSource",
    "_format2dtypes",
    "apply_padding_to_scale_inv",
    "apply_rht",
    "autocast",
    "fp8_autocast",
    "get_device_compute_capability",
    "get_global_quantize_recipe",
    "get_quantization_recipe",
    "get_quantize_config",
    "get_quantize_config_with_recipe",
    "get_supported_quantization_recipes",
    "get_supported_scaling_modes",
    "is_fp8_available",
    "is_quantize_recipe_supported",
    "is_scaling_mode_supported",
    "remove_padding_from_scale_inv",
    "update_collections",
]
