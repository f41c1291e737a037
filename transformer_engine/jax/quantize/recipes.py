"""Recipe table: scaling modes and options for the three tensors, state, and required compute capability.

No other transformer_engine.jax module depends on a recipe's class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ...common import recipe as recipes
from ...common.checks import described
from ...common.hardware import Capability, capability_limits, is_older
from ...common.numbers import with_article
from ..runtime.platform import hardware, is_emulating
from .quantizers import (
    BlockScaleQuantizer,
    CurrentScaleQuantizer,
    DelayedScaleQuantizer,
    NVFP4Quantizer,
    Quantizer,
)
from .scaling_modes import AmaxComputeAlgo, QuantizeLayout, ScalingMode, TensorSource

X, KERNEL, DGRAD = TensorSource.X, TensorSource.KERNEL, TensorSource.DGRAD


@dataclass(frozen=True)
class RecipeFamily:
    """Properties of one recipe class.

    Attributes:
        name: Name on command lines, as in transformer_engine.pytorch.
        recipe: Recipe class.
        modes: (recipe, source) -> scaling mode of the tensor.
        options: (recipe, source) -> further arguments for the tensor's quantizer.
        needs: Hardware capability that supports the recipe.
        check: Raises ValueError for settings that transformer_engine.jax does not support.
        stateful: Whether quantizers have scales and amax histories as state.
        random: recipe -> whether gradients are rounded stochastically.
    """

    name: str
    recipe: type[recipes.Recipe]
    modes: Callable[[Any, TensorSource], ScalingMode]
    options: Callable[[Any, TensorSource], dict[str, Any]]
    needs: Capability
    check: Callable[[Any], None] = lambda recipe: None
    stateful: bool = False
    random: Callable[[Any], bool] = lambda recipe: False


def _check_delayed(recipe: recipes.DelayedScaling) -> None:
    if callable(recipe.amax_compute_algo):
        raise ValueError(
            f"DelayedScaling: amax_compute_algo={described(recipe.amax_compute_algo)} is a function; "
            "pass 'max' or 'most_recent'"
        )
    if recipe.scaling_factor_compute_algo is not None:
        raise ValueError(
            "DelayedScaling: scaling_factor_compute_algo="
            f"{described(recipe.scaling_factor_compute_algo)}; transformer_engine.jax supports None only"
        )
    if not recipe.reduce_amax:
        raise ValueError(
            "DelayedScaling: reduce_amax=False; JAX reduces maxima over the whole mesh, set it to True"
        )


def _params(recipe: Any, source: TensorSource) -> recipes.QParams:
    """Options for a tensor in a recipe that has per-tensor options."""
    if isinstance(recipe, recipes.NVFP4BlockScaling):
        params = (recipe.fp4_quant_fwd_inp, recipe.fp4_quant_fwd_weight, recipe.fp4_quant_bwd_grad)
    else:
        params = (recipe.fp8_quant_fwd_inp, recipe.fp8_quant_fwd_weight, recipe.fp8_quant_bwd_grad)
    return params[(X, KERNEL, DGRAD).index(source)]


def _scale_options(
    recipe: recipes.Float8CurrentScaling | recipes.Float8BlockScaling, source: TensorSource
) -> dict[str, Any]:
    params = _params(recipe, source)
    return {"power_of_two": params.power_2_scale, "epsilon": params.amax_epsilon}


def _block_mode(recipe: recipes.Float8BlockScaling, source: TensorSource) -> ScalingMode:
    dimensions = {
        X: recipe.x_block_scaling_dim,
        KERNEL: recipe.w_block_scaling_dim,
        DGRAD: recipe.grad_block_scaling_dim,
    }
    return ScalingMode.BLOCK_2D_SCALING if dimensions[source] == 2 else ScalingMode.BLOCK_1D_SCALING


def _nvfp4_mode(recipe: recipes.NVFP4BlockScaling, source: TensorSource) -> ScalingMode:
    square = _params(recipe, source).fp4_2d_quantization
    to_256 = bool(_four_over_six(recipe, source)) and _concerns(
        recipe.nvfp4_4over6_e4m3_use_256, source
    )
    if recipe.row_scaled_activation and source is X:
        return ScalingMode.NVFP4_ROWS_256_SCALING if to_256 else ScalingMode.NVFP4_ROWS_SCALING
    if square:
        return ScalingMode.NVFP4_2D_256_SCALING if to_256 else ScalingMode.NVFP4_2D_SCALING
    return ScalingMode.NVFP4_1D_256_SCALING if to_256 else ScalingMode.NVFP4_1D_SCALING


def _concerns(scope: str, source: TensorSource) -> bool:
    """Whether a scope in the recipe's 4over6 holds for a tensor; no scope holds for gradients."""
    return source is not DGRAD and scope in (
        "all",
        "weights" if source is KERNEL else "activations",
    )


def _four_over_six(recipe: recipes.NVFP4BlockScaling, source: TensorSource) -> str:
    """Error metric by which 4over6 selects scales for a tensor; empty if 4over6 is off."""
    return recipe.nvfp4_4over6_err_mode if _concerns(recipe.nvfp4_4over6, source) else ""


def _nvfp4_options(recipe: recipes.NVFP4BlockScaling, source: TensorSource) -> dict[str, Any]:
    params = _params(recipe, source)
    transforms = params.random_hadamard_transform and not params.fp4_2d_quantization
    return {"use_rht": transforms, "four_over_six": _four_over_six(recipe, source)}


def _check_nvfp4(recipe: recipes.NVFP4BlockScaling) -> None:
    variants = {
        "row_scaled_activation": recipe.row_scaled_activation,
        "nvfp4_4over6": _concerns(recipe.nvfp4_4over6, X),
    }
    params = recipe.fp4_quant_fwd_inp
    for name in (name for name, enabled in variants.items() if enabled):
        if params.random_hadamard_transform and not params.fp4_2d_quantization:
            raise ValueError(
                f"NVFP4BlockScaling: {name}={getattr(recipe, name)!r} of activations excludes the Hadamard transform; "
                "set disable_rht=True, or NVTE_NVFP4_DISABLE_RHT=1"
            )


FAMILIES: dict[type[recipes.Recipe], RecipeFamily] = {
    family.recipe: family
    for family in (
        RecipeFamily(
            "delayed",
            recipes.DelayedScaling,
            lambda recipe, source: ScalingMode.DELAYED_TENSOR_SCALING,
            lambda recipe, source: {
                "margin": float(recipe.margin),
                "amax_compute_algo": AmaxComputeAlgo(recipe.amax_compute_algo),
            },
            "fp8 recipe",
            check=_check_delayed,
            stateful=True,
        ),
        RecipeFamily(
            "current",
            recipes.Float8CurrentScaling,
            lambda recipe, source: ScalingMode.CURRENT_TENSOR_SCALING,
            _scale_options,
            "fp8 recipe",
        ),
        RecipeFamily(
            "block",
            recipes.Float8BlockScaling,
            _block_mode,
            _scale_options,
            "fp8_block_scaling recipe",
        ),
        RecipeFamily(
            "mxfp8",
            recipes.MXFP8BlockScaling,
            lambda recipe, source: (
                ScalingMode.MXFP8_2D_SCALING
                if recipe.enable_2d_quantization and source is KERNEL
                else ScalingMode.MXFP8_1D_SCALING
            ),
            lambda recipe, source: {},
            "mxfp8 recipe",
        ),
        RecipeFamily(
            "nvfp4",
            recipes.NVFP4BlockScaling,
            _nvfp4_mode,
            _nvfp4_options,
            "nvfp4 recipe",
            check=_check_nvfp4,
            random=lambda recipe: recipe.fp4_quant_bwd_grad.stochastic_rounding,
        ),
    )
}

QUANTIZERS: dict[ScalingMode, type[Quantizer]] = {
    ScalingMode.DELAYED_TENSOR_SCALING: DelayedScaleQuantizer,
    ScalingMode.CURRENT_TENSOR_SCALING: CurrentScaleQuantizer,
    ScalingMode.MXFP8_1D_SCALING: BlockScaleQuantizer,
    ScalingMode.MXFP8_2D_SCALING: BlockScaleQuantizer,
    ScalingMode.BLOCK_1D_SCALING: BlockScaleQuantizer,
    ScalingMode.BLOCK_2D_SCALING: BlockScaleQuantizer,
    ScalingMode.NVFP4_1D_SCALING: NVFP4Quantizer,
    ScalingMode.NVFP4_2D_SCALING: NVFP4Quantizer,
    ScalingMode.NVFP4_1D_256_SCALING: NVFP4Quantizer,
    ScalingMode.NVFP4_2D_256_SCALING: NVFP4Quantizer,
    ScalingMode.NVFP4_ROWS_SCALING: NVFP4Quantizer,
    ScalingMode.NVFP4_ROWS_256_SCALING: NVFP4Quantizer,
}


def find_family(recipe: recipes.Recipe) -> RecipeFamily:
    """Get the family of a recipe or recipe subclass.

    Raises:
        ValueError: The recipe has no family, as a custom recipe.
    """
    for cls in type(recipe).__mro__:
        if cls in FAMILIES:
            return FAMILIES[cls]
    names = ", ".join(cls.__name__ for cls in FAMILIES)
    raise ValueError(
        f"recipe={described(recipe)}: transformer_engine.jax supports {names}; choose one of them"
    )


def check_family(recipe: recipes.Recipe) -> RecipeFamily:
    """Get a recipe's family and check its settings.

    Raises:
        ValueError: transformer_engine.jax does not support the recipe or a recipe setting.
    """
    family = find_family(recipe)
    override = getattr(recipe, "backward_override", None)
    if override is not None:
        raise ValueError(
            f"{type(recipe).__name__}: backward_override={override!r}; transformer_engine.jax quantizes the products "
            "of the backward pass as the recipe states, set it to None or unset NVTE_BACKWARD_OVERRIDE"
        )
    family.check(recipe)
    return family


def element_types(recipe: recipes.Recipe) -> tuple[Any, Any]:
    """Code dtypes in the forward and the backward pass."""
    form = recipe.fp4_format if isinstance(recipe, recipes.NVFP4BlockScaling) else recipe.fp8_format
    return format_dtypes(form)


def format_dtypes(form: recipes.Format | None) -> tuple[Any, Any]:
    """Code dtypes for a Format in the forward and the backward pass; bfloat16 for None."""
    table = {
        None: (jnp.bfloat16, jnp.bfloat16),
        recipes.Format.E4M3: (jnp.float8_e4m3fn, jnp.float8_e4m3fn),
        recipes.Format.E5M2: (jnp.float8_e5m2, jnp.float8_e5m2),
        recipes.Format.HYBRID: (jnp.float8_e4m3fn, jnp.float8_e5m2),
        recipes.Format.E2M1: (jnp.float4_e2m1fn, jnp.float4_e2m1fn),
    }
    if form is not None and not isinstance(form, recipes.Format):
        raise TypeError(
            f"form={described(form)} is {with_article(type(form))}; pass a recipe.Format, or None"
        )
    return table[form]


def make_quantizer(
    recipe: recipes.Recipe,
    source: TensorSource,
    layout: QuantizeLayout,
    checkpoint_name: str | None,
    **state: Any,
) -> Quantizer:
    """Create the quantizer for one tensor in a linear layer.

    Args:
        recipe: recipes.Recipe of the layer.
        source: The tensor.
        layout: Stored directions.
        checkpoint_name: Code and scale name for recomputation policies.
        **state: Quantizer state, by field names.

    Raises:
        ValueError: As in `check_family`.
    """
    family = check_family(recipe)
    mode = family.modes(recipe, source)
    dtypes = element_types(recipe)
    return QUANTIZERS[mode](
        q_dtype=jnp.dtype(dtypes[1] if source is DGRAD else dtypes[0]),
        scaling_mode=mode,
        q_layout=layout,
        data_layout=mode.data_layout,
        checkpoint_name=checkpoint_name,
        **family.options(recipe, source),
        **state,
    )


def unsupported_reason(family: RecipeFamily, gpu_id: int = 0) -> str | None:
    """Reason why this machine supports a recipe neither in hardware nor by emulation, or None."""
    if is_emulating():
        return None
    gpu, name = hardware(gpu_id), family.recipe.__name__
    if gpu.has(family.needs):
        return None
    least, below = capability_limits(family.needs)
    if gpu.vendor != "nvidia":
        limit = f"needs an NVIDIA GPU of compute capability {least.architecture}, this GPU is {gpu.title}"
    elif is_older(gpu, least) or below is None:
        limit = f"needs compute capability {least.architecture}, this GPU has {gpu.architecture}"
    else:
        limit = f"is unsupported from compute capability {below.architecture} on, this GPU has {gpu.architecture}"
    return f"{name} {limit}; set TE_EMULATE=1 to compute it by emulation"
