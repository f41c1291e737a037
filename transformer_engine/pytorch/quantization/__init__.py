"""Precision control: autocast, quantized parameters, recipe state, and what this machine can run."""

from .autocast import AutocastState, autocast, current, fp8_autocast
from .delayed_scaling import _amax_and_scale_update, _default_sf_compute, update_scales
from .element_types import get_fp4_te_dtype, get_fp8_max, get_fp8_te_dtype, get_fp8_torch_dtype
from .extra_state import (
    ExtraStateError,
    check_extra_state,
    decode_extra_state,
    encode_extra_state,
    load_extra_state,
)
from .factory import get_align_size_for_quantization, make_quantizers
from .global_state import FP8GlobalStateManager
from .model_init import ModelInitState, current_model_init, fp8_model_init, quantized_model_init
from .recipe_state import (
    CustomRecipeState,
    DelayedScalingRecipeState,
    Float8BlockScalingRecipeState,
    Float8CurrentScalingRecipeState,
    MXFP8BlockScalingRecipeState,
    NVFP4BlockScalingRecipeState,
    RecipeState,
)
from .roles import DelayedScalingRequest, QuantizerRequest, QuantizerRole
from .support import (
    Support,
    check_bf16_support,
    check_fp8_block_scaling_support,
    check_fp8_support,
    check_mxfp8_support,
    check_nvfp4_support,
    check_recipe_support,
    emulate,
    get_default_recipe,
    is_bf16_available,
    is_emulating,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    support_of,
)

get_default_fp8_recipe = get_default_recipe
