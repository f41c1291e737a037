"""Precision control: autocast, quantized parameters, recipe state, and what this machine can run."""

from __future__ import annotations

from . import families
from .autocast import AutocastState, autocast, current, fp8_autocast
from .delayed_scaling import _amax_and_scale_update, _default_sf_compute, update_scales
from .extra_state import (
    ExtraStateError,
    check_extra_state,
    decode_extra_state,
    encode_extra_state,
    load_extra_state,
    validate_state,
)
from .families import *  # noqa: F403 - by the list in __all__
from .family import Family, all_families, family_named, find_family
from .global_state import FP8GlobalState, FP8GlobalStateManager
from .model_init import ModelInitState, current_model_init, fp8_model_init, quantized_model_init
from .recipe_state import (
    CustomRecipeState,
    DelayedScalingRecipeState,
    RecipeState,
    get_align_size_for_quantization,
    get_fp4_te_dtype,
    get_fp8_max,
    get_fp8_te_dtype,
    get_fp8_torch_dtype,
    make_quantizers,
)
from .roles import DelayedScalingRequest, QuantizerRequest, QuantizerRole
from .support import (
    Support,
    check_recipe_support,
    emulate,
    format_support,
    get_default_recipe,
    is_emulating,
)

__all__ = [
    "AutocastState",
    "CustomRecipeState",
    "DelayedScalingRecipeState",
    "DelayedScalingRequest",
    "ExtraStateError",
    "FP8GlobalState",
    "FP8GlobalStateManager",
    "Family",
    "ModelInitState",
    "QuantizerRequest",
    "QuantizerRole",
    "RecipeState",
    "Support",
    "_amax_and_scale_update",
    "_default_sf_compute",
    "all_families",
    "autocast",
    "check_extra_state",
    "check_recipe_support",
    "current",
    "current_model_init",
    "decode_extra_state",
    "emulate",
    "encode_extra_state",
    "family_named",
    "find_family",
    "format_support",
    "fp8_autocast",
    "fp8_model_init",
    "get_align_size_for_quantization",
    "get_default_fp8_recipe",
    "get_default_recipe",
    "get_fp4_te_dtype",
    "get_fp8_max",
    "get_fp8_te_dtype",
    "get_fp8_torch_dtype",
    "is_emulating",
    "load_extra_state",
    "make_quantizers",
    "quantized_model_init",
    "update_scales",
    "validate_state",
]
__all__ += families.__all__

get_default_fp8_recipe = get_default_recipe
