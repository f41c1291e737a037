"""One row per recipe family: the quantizer of a slot, its state, the hardware that supports it, ..

A product has three forward slots [input, weight, output] and two backward slots [grad_output, grad_input]; a
module with several products repeats them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ...common.formats import BLOCK_1D, BLOCK_2D, FLOAT8, MXFP8, NVFP4
from ...common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
)
from ..constants import DType
from ..runtime.device import current_hardware
from ..tensor.float8_blockwise_tensor import Float8BlockQuantizer
from ..tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
from ..tensor.mxfp8_tensor import MXFP8Quantizer
from ..tensor.nvfp4_tensor import NVFP4Quantizer
from ..tensor.quantizer import Quantizer
from . import support
from .family import Family, FormatSample, Requirement, all_families, register, rows_are_independent
from .recipe_state import (
    CustomRecipeState,
    DelayedScalingRecipeState,
    StatelessRecipeState,
    get_fp4_te_dtype,
    get_fp8_te_dtype,
)

# The states, and what this machine computes, by NVIDIA's names: written out for type checkers.
__all__ = [
    "Float8BlockScalingRecipeState",
    "Float8CurrentScalingRecipeState",
    "MXFP8BlockScalingRecipeState",
    "NVFP4BlockScalingRecipeState",
    "check_bf16_support",
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "check_nvfp4_support",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
]

T = TypeVar("T")
FP8 = Requirement("FP8", "fp8 recipe")


class Float8CurrentScalingRecipeState(StatelessRecipeState):
    """Scales come from the tensor at hand."""


class MXFP8BlockScalingRecipeState(StatelessRecipeState):
    """Scales come from the tensor at hand."""


class Float8BlockScalingRecipeState(StatelessRecipeState):
    """Scales come from the tensor at hand."""


class NVFP4BlockScalingRecipeState(StatelessRecipeState):
    """Scales come from the tensor at hand."""

    @property
    def dtype(self) -> DType:
        return get_fp4_te_dtype(self.recipe)


def _params(recipe: Float8CurrentScaling | Float8BlockScaling, mode: str, tensor: str) -> QParams:
    of_kinds = recipe.fp8_quant_fwd_inp, recipe.fp8_quant_fwd_weight, recipe.fp8_quant_bwd_grad
    return _slot_setting(mode, tensor, *of_kinds)


def _slot_setting(mode: str, tensor: str, of_input: T, of_weight: T, of_gradient: T) -> T:
    """Return the recipe setting for the tensor kind of a slot."""
    if mode == "backward":
        return of_gradient
    return of_weight if tensor == "weight" else of_input


def _current_scaling(
    recipe: Float8CurrentScaling, mode: str, tensor: str, device: torch.device
) -> Quantizer:
    params = _params(recipe, mode, tensor)
    return Float8CurrentScalingQuantizer(
        get_fp8_te_dtype(recipe, mode == "forward"),
        device,
        force_pow_2_scales=params.power_2_scale,
        amax_epsilon=params.amax_epsilon,
    )


def _block_scaling(
    recipe: Float8BlockScaling, mode: str, tensor: str, device: torch.device
) -> Quantizer:
    params = _params(recipe, mode, tensor)
    dimensions = (
        recipe.x_block_scaling_dim,
        recipe.w_block_scaling_dim,
        recipe.grad_block_scaling_dim,
    )
    return Float8BlockQuantizer(
        get_fp8_te_dtype(recipe, mode == "forward"),
        rowwise=True,
        columnwise=True,
        amax_epsilon=params.amax_epsilon,
        force_pow_2_scales=params.power_2_scale,
        block_scaling_dim=_slot_setting(mode, tensor, *dimensions),
    )


def _dependence_of_blocks(recipe: Float8BlockScaling) -> str | None:
    names = [
        name
        for name in ("x_block_scaling_dim", "grad_block_scaling_dim")
        if getattr(recipe, name) == 2
    ]
    return f"with {names[0]}=2, 128 rows share a scale; set it to 1" if names else None


def _dependence_of_nvfp4(recipe: NVFP4BlockScaling) -> str | None:
    if not recipe.row_scaled_activation:
        return (
            "its second-level scale is computed from the maximum of the whole tensor; set row_scaled_activation=True "
            "and disable_rht=True"
        )
    if recipe.backward_override != "high_precision":
        return (
            "its gradients have one second-level scale for the whole tensor, and are rounded stochastically; set "
            "backward_override='high_precision'"
        )
    return None


def _mxfp8(recipe: MXFP8BlockScaling, mode: str, tensor: str, device: torch.device) -> Quantizer:
    dtype = get_fp8_te_dtype(recipe, mode == "forward")
    if recipe.enable_2d_quantization and tensor == "weight":
        return MXFP8Quantizer(dtype, rowwise=True, columnwise=True, with_2d_quantization=True)
    return MXFP8Quantizer(dtype, rowwise=True, columnwise=True)


def _nvfp4(recipe: NVFP4BlockScaling, mode: str, tensor: str, device: torch.device) -> Quantizer:
    params = _slot_setting(
        mode,
        tensor,
        recipe.fp4_quant_fwd_inp,
        recipe.fp4_quant_fwd_weight,
        recipe.fp4_quant_bwd_grad,
    )
    # 4over6 and scales per row, where the recipe switches one on for this tensor; never gradients.
    variants: dict[str, Any] = {}
    if mode != "backward":
        scope = "weights" if tensor == "weight" else "activations"
        if recipe.row_scaled_activation and scope == "activations":
            variants["row_scaled_nvfp4"] = True
        if recipe.nvfp4_4over6 in (scope, "all"):
            variants["nvfp4_use_4over6"] = True
            variants["nvfp4_e4m3_max"] = (
                256 if recipe.nvfp4_4over6_e4m3_use_256 in (scope, "all") else 448
            )
            variants["nvfp4_4over6_err_mode"] = recipe.nvfp4_4over6_err_mode
    return NVFP4Quantizer(
        get_fp4_te_dtype(recipe),
        rowwise=True,
        columnwise=True,
        with_rht=params.random_hadamard_transform,
        with_post_rht_amax=params.random_hadamard_transform,
        with_2d_quantization=params.fp4_2d_quantization,
        stochastic_rounding=params.stochastic_rounding,
        **variants,
    )


register(
    Family(
        DelayedScaling,
        "delayed",
        DelayedScalingRecipeState,
        None,
        kind="fp8",
        requirement=FP8,
        samples=(
            FormatSample(
                "delayed",
                FLOAT8,
                lambda device, **usage: Float8Quantizer(
                    torch.ones(1, device=device),
                    torch.zeros(1, device=device),
                    DType.kFloat8E4M3,
                    **usage,
                ),
            ),
        ),
        attention="delayed",
        measured_as="delayed",
        stateful=True,
        follows_history=True,
        batch_dependence=rows_are_independent,
        fits=lambda: True,
    )
)
register(
    Family(
        Float8CurrentScaling,
        "current",
        Float8CurrentScalingRecipeState,
        _current_scaling,
        kind="fp8",
        requirement=FP8,
        samples=(
            FormatSample(
                "current",
                FLOAT8,
                lambda device, **usage: Float8CurrentScalingQuantizer(
                    DType.kFloat8E4M3, device, **usage
                ),
            ),
        ),
        attention="current",
        measured_as="current",
        batch_dependence=lambda recipe: (
            "its scale is computed from the maximum of the whole tensor; use DelayedScaling, whose scales come from "
            "earlier steps, or Float8BlockScaling or MXFP8BlockScaling, whose scales are those of parts of a row"
        ),
        fits=lambda: current_hardware().has("current scaling by default"),
    )
)
register(
    Family(
        Float8BlockScaling,
        "block",
        Float8BlockScalingRecipeState,
        _block_scaling,
        kind="fp8_block_scaling",
        requirement=Requirement("FP8 block scaling", "fp8_block_scaling recipe", cuda=(12, 9)),
        samples=(
            FormatSample(
                "block1d",
                BLOCK_1D,
                lambda device, **usage: Float8BlockQuantizer(
                    DType.kFloat8E4M3, block_scaling_dim=1, **usage
                ),
            ),
            FormatSample(
                "block2d",
                BLOCK_2D,
                lambda device, **usage: Float8BlockQuantizer(
                    DType.kFloat8E4M3, block_scaling_dim=2, **usage
                ),
            ),
        ),
        measured_as="block",
        batch_dependence=_dependence_of_blocks,
    )
)
register(
    Family(
        MXFP8BlockScaling,
        "mxfp8",
        MXFP8BlockScalingRecipeState,
        _mxfp8,
        kind="mxfp8",
        requirement=Requirement("MXFP8", "mxfp8 recipe"),
        alignment=lambda recipe: 32,
        samples=(
            FormatSample(
                "mxfp8", MXFP8, lambda device, **usage: MXFP8Quantizer(DType.kFloat8E4M3, **usage)
            ),
        ),
        attention="mxfp8",
        batch_dependence=rows_are_independent,
        fits=lambda: support.format_support("mxfp8").native,
    )
)
register(
    Family(
        NVFP4BlockScaling,
        "nvfp4",
        NVFP4BlockScalingRecipeState,
        _nvfp4,
        kind="nvfp4",
        requirement=Requirement("NVFP4", "nvfp4 recipe"),
        alignment=lambda recipe: 128,
        samples=(FormatSample("nvfp4", NVFP4, lambda device, **usage: NVFP4Quantizer(**usage)),),
        batch_dependence=_dependence_of_nvfp4,
    )
)
register(
    Family(
        CustomRecipe,
        "custom",
        CustomRecipeState,
        None,
        alignment=lambda recipe: recipe.quantization_alignment,
        attention="block",
        stateful=True,
        checkpointed=False,
    )
)

for _family in all_families():
    if _family.fits is not None:
        support.prepare_default(_family)

is_bf16_available = support.availability("bf16")
is_fp8_available = support.availability("fp8")
is_fp8_block_scaling_available = support.availability("fp8_block_scaling")
is_mxfp8_available = support.availability("mxfp8")
is_nvfp4_available = support.availability("nvfp4")

check_bf16_support = support.check("bf16")
check_fp8_support = support.check("fp8")
check_fp8_block_scaling_support = support.check("fp8_block_scaling")
check_mxfp8_support = support.check("mxfp8")
check_nvfp4_support = support.check("nvfp4")


class FormatChecks:
    """The checks as `FP8GlobalStateManager` static methods."""

    is_bf16_available = staticmethod(check_bf16_support)
    is_fp8_available = staticmethod(check_fp8_support)
    is_fp8_block_scaling_available = staticmethod(check_fp8_block_scaling_support)
    is_mxfp8_available = staticmethod(check_mxfp8_support)
    is_nvfp4_available = staticmethod(check_nvfp4_support)


class FormatAttributes(type):
    """The results of the checks as `FP8GlobalStateManager` class attributes, read-only."""

    if TYPE_CHECKING:  # the loop below defines them

        @property
        def fp8_available(cls) -> bool: ...

        @property
        def reason_for_no_fp8(cls) -> str: ...

        @property
        def fp8_block_scaling_available(cls) -> bool: ...

        @property
        def reason_for_no_fp8_block_scaling(cls) -> str: ...

        @property
        def mxfp8_available(cls) -> bool: ...

        @property
        def reason_for_no_mxfp8(cls) -> str: ...

        @property
        def nvfp4_available(cls) -> bool: ...

        @property
        def reason_for_no_nvfp4(cls) -> str: ...


def _support(kind: str, part: int) -> property:
    return property(lambda cls: support.check(kind)()[part])


# <kind>_available and reason_for_no_<kind>, for every kind that a recipe needs.
for _kind in dict.fromkeys(row.kind for row in all_families() if row.kind is not None):
    setattr(FormatAttributes, f"{_kind}_available", _support(_kind, 0))
    setattr(FormatAttributes, f"reason_for_no_{_kind}", _support(_kind, 1))
