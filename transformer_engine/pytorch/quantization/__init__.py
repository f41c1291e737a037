"""Precision control: autocast, quantized parameters, recipe state, and what this machine can run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .autocast import AutocastState, autocast, current, fp8_autocast
from .delayed_scaling import _amax_and_scale_update, _default_sf_compute, update_scales
from .extra_state import (
    ExtraStateError,
    check_extra_state,
    decode_extra_state,
    encode_extra_state,
    load_extra_state,
    validated_state,
)
from .families import *  # noqa: F403 - the states, by the list in __all__
from .family import Family, all_families, family_named, family_of
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
    availability,
    check_recipe_support,
    checks,
    emulate,
    get_default_recipe,
    is_emulating,
    support_of,
)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """check_<kind>_support and is_<kind>_available, which follow from the families."""


get_default_fp8_recipe = get_default_recipe
globals().update(checks() | availability())
