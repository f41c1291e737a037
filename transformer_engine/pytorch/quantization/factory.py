"""quantizers = make_quantizers(recipe, ...): the only place that asks which recipe it is.

A product has three forward slots [input, weight, output] and two backward slots [grad_output, grad_input]; a
module with several products repeats them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ...common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)
from ..tensor.float8_blockwise_tensor import Float8BlockQuantizer
from ..tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
from ..tensor.identity_tensor import IdentityQuantizer
from ..tensor.mxfp8_tensor import MXFP8Quantizer
from ..tensor.nvfp4_tensor import NVFP4Quantizer
from ..tensor.quantizer import Quantizer
from .element_types import get_fp4_te_dtype, get_fp8_te_dtype
from .roles import QuantizerRole, asked_roles, tensor_types

if TYPE_CHECKING:
    from .recipe_state import RecipeState

MODES = ("forward", "backward")
_FAMILIES = (
    DelayedScaling,
    Float8CurrentScaling,
    Float8BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    CustomRecipe,
)


def family(recipe: Recipe) -> type[Recipe]:
    """The public recipe class that recipe is, or is derived from."""
    for candidate in _FAMILIES:
        if isinstance(recipe, candidate):
            return candidate
    raise ValueError(
        f"{type(recipe).__name__} is none of {', '.join(c.__name__ for c in _FAMILIES)}; derive it from one"
    )


def make_quantizers(
    recipe: Recipe,
    mode: str,
    count: int,
    device: torch.device,
    state: RecipeState,
    roles: Sequence[QuantizerRole | None] | None = None,
) -> list[Quantizer]:
    """One quantizer a slot; state owns the tensors of delayed scaling."""
    if roles is not None and len(roles) != count:
        raise ValueError(
            f"{len(roles)} roles for {count} quantizers; give one a slot, None for those unknown"
        )
    make: Callable[[str], Quantizer]
    match recipe:
        case DelayedScaling():
            dtype = get_fp8_te_dtype(recipe, mode == "forward")
            (owner,) = state.delayed_states
            return [Float8Quantizer.from_state(owner, slot, dtype) for slot in range(count)]  # pyright: ignore
        case CustomRecipe():
            return state.fulfil(asked_roles(mode, count, roles))
        case Float8CurrentScaling():
            make = lambda tensor: _current_scaling(recipe, mode, tensor, device)  # noqa: E731
        case Float8BlockScaling():
            make = lambda tensor: _block_scaling(recipe, mode, tensor)  # noqa: E731
        case MXFP8BlockScaling():
            make = lambda tensor: _mxfp8(recipe, mode, tensor)  # noqa: E731
        case NVFP4BlockScaling():
            make = lambda tensor: _nvfp4(recipe, mode, tensor)  # noqa: E731
        case _:
            raise ValueError(f"no quantizers for {type(recipe).__name__}; see family()")
    return [make(tensor) for tensor in tensor_types(mode, count, roles)]


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """Rows of a group are padded to a multiple of this before quantization."""
    match recipe:
        case MXFP8BlockScaling():
            return 32
        case NVFP4BlockScaling():
            return 128
        case CustomRecipe():
            return recipe.quantization_alignment
    return 16


def _params(recipe: Float8CurrentScaling | Float8BlockScaling, mode: str, tensor: str) -> QParams:
    if mode == "backward":
        return recipe.fp8_quant_bwd_grad
    return recipe.fp8_quant_fwd_weight if tensor == "weight" else recipe.fp8_quant_fwd_inp


def _current_scaling(recipe: Float8CurrentScaling, mode: str, tensor: str, device: torch.device) -> Quantizer:
    params = _params(recipe, mode, tensor)
    return Float8CurrentScalingQuantizer(
        get_fp8_te_dtype(recipe, mode == "forward"),
        device,
        force_pow_2_scales=params.power_2_scale,
        amax_epsilon=params.amax_epsilon,
    )


def _block_scaling(recipe: Float8BlockScaling, mode: str, tensor: str) -> Quantizer:
    params = _params(recipe, mode, tensor)
    if mode == "backward":
        dimension = recipe.grad_block_scaling_dim
    elif tensor == "weight":
        dimension = recipe.w_block_scaling_dim
    else:
        dimension = recipe.x_block_scaling_dim
    return Float8BlockQuantizer(
        get_fp8_te_dtype(recipe, mode == "forward"),
        rowwise=True,
        columnwise=True,
        amax_epsilon=params.amax_epsilon,
        force_pow_2_scales=params.power_2_scale,
        block_scaling_dim=dimension,
    )


def _mxfp8(recipe: MXFP8BlockScaling, mode: str, tensor: str) -> Quantizer:
    dtype = get_fp8_te_dtype(recipe, mode == "forward")
    if recipe.enable_2d_quantization and tensor == "weight":
        return MXFP8Quantizer(dtype, rowwise=True, columnwise=True, with_2d_quantization=True)
    return MXFP8Quantizer(dtype, rowwise=True, columnwise=True)


def _nvfp4(recipe: NVFP4BlockScaling, mode: str, tensor: str) -> Quantizer:
    if mode == "backward":
        params = recipe.fp4_quant_bwd_grad
    elif tensor == "weight":
        params = recipe.fp4_quant_fwd_weight
    else:
        params = recipe.fp4_quant_fwd_inp
    return NVFP4Quantizer(
        get_fp4_te_dtype(recipe),
        rowwise=True,
        columnwise=True,
        with_rht=params.random_hadamard_transform,
        with_post_rht_amax=params.random_hadamard_transform,
        with_2d_quantization=params.fp4_2d_quantization,
        stochastic_rounding=params.stochastic_rounding,
        **_nvfp4_variants(recipe, mode, tensor),  # pyright: ignore[reportArgumentType]
    )


def _nvfp4_variants(recipe: NVFP4BlockScaling, mode: str, tensor: str) -> dict[str, bool]:
    """Arguments of the optional NVFP4 scalings, only where the recipe switches one on for this tensor."""
    if mode == "backward":
        return {}
    scope = "weights" if tensor == "weight" else "activations"
    variants: dict[str, bool] = {}
    if recipe.row_scaled_activation and scope == "activations":
        variants["row_scaled_nvfp4"] = True
    if recipe.nvfp4_4over6 in (scope, "all"):
        variants["nvfp4_use_4over6"] = True
    return variants


def identity() -> Quantizer:
    """What an empty answer of a custom factory means: leave the tensor in high precision."""
    return IdentityQuantizer()
