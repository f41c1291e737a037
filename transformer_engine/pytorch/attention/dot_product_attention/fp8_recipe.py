"""Which FP8 attention the recipe of `autocast`, and the variables beside it, ask for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....common import env
from ....common.memory import Memory
from ....common.recipe import DelayedScaling, Format, Recipe
from ...module.layernorm_linear import LayerNormLinear
from ...module.linear import Linear
from ...quantization.autocast import AutocastState
from ...quantization.family import all_families, family_of


def _from_environment(texts: tuple[str | None, ...]) -> Recipe | None:
    """The recipe that NVTE_DPA_FP8_RECIPE names for attention; None for F16. texts: those of _VARIABLES."""
    kind = env.get("NVTE_DPA_FP8_RECIPE")
    common: dict[str, Any] = {
        "fp8_format": Format[str(env.get("NVTE_DPA_FP8_FORMAT"))],
        "fp8_dpa": env.flag("NVTE_DPA_FP8_RECIPE_DPA"),
        "fp8_mha": env.flag("NVTE_DPA_FP8_RECIPE_MHA"),
    }
    if kind == "DelayedScaling":
        return DelayedScaling(
            amax_history_len=int(env.get("NVTE_DPA_FP8DS_AMAX_HISTLEN") or 1),
            amax_compute_algo=str(env.get("NVTE_DPA_FP8DS_AMAX_ALGO")),
            reduce_amax=env.flag("NVTE_DPA_FP8DS_REDUCE_AMAX"),
            **common,
        )
    chosen: list[Any] = [family.recipe for family in all_families() if family.recipe.__name__ == kind]
    return chosen[0](**common) if chosen else None


_VARIABLES = (
    "NVTE_DPA_FP8_RECIPE",
    "NVTE_DPA_FP8_FORMAT",
    "NVTE_DPA_FP8_RECIPE_DPA",
    "NVTE_DPA_FP8_RECIPE_MHA",
    "NVTE_DPA_FP8DS_AMAX_HISTLEN",
    "NVTE_DPA_FP8DS_AMAX_ALGO",
    "NVTE_DPA_FP8DS_REDUCE_AMAX",
)
_asked_for = env.watch(_VARIABLES[0])
_RECIPES: Memory[tuple[str | None, ...], Recipe | None] = Memory(_from_environment, 64)


def attention_recipe(recipe: Recipe | None) -> Recipe | None:
    """The recipe of the attention under a recipe of the layers round it; None: no FP8 attention."""
    if recipe is None:
        return None
    if _asked_for() is not None and env.get(_VARIABLES[0]):
        recipe = _RECIPES[env.texts(_VARIABLES)]
    # A recipe from outside need not have the two fields.
    if getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False):
        return recipe
    return None


def outputs_codes(state: AutocastState) -> bool:
    """Do the projections round an attention hand it codes, and take its output as codes (fp8_mha)?

    A compiled graph has no quantized tensors at the borders of its modules.
    """
    if not getattr(state.recipe, "fp8_mha", False) or torch.compiler.is_compiling():
        return False
    recipe = attention_recipe(state.recipe)
    return recipe is not None and recipe is state.recipe and family_of(recipe).kind == "fp8"


def projects_codes(projection: Linear | LayerNormLinear, state: AutocastState, x: Tensor) -> bool:
    """Does a projection of x compute in FP8, so that its output slot can make codes? Then of rows alone.

    Not under delayed scaling, whose scales follow what a slot has seen: compiled calls and those with a cache use the
    attention's own slot, so all have to. Not in training with a backward in 16 bits, which has to turn the codes into
    values again: on an H200 (2 sequences of 2048, 32 query and 8 key heads of 128) both passes of the layer then take
    1.94 ms instead of 1.76, while a forward alone takes 0.50 instead of 0.55.
    """
    assert state.recipe is not None
    if family_of(state.recipe).follows_history or (projection.training and not env.flag("NVTE_FP8_DPA_BWD")):
        return False
    extents = (projection.in_features, projection.out_features)
    (product,) = projection.quantizable_products(state, x, (extents,))
    if product.output.is_identity:
        return False
    # Attention contracts the sizes of heads: no product reads these codes by columns.
    product.output.set_usage(columnwise=False)
    return True


def scaling_of(recipe: Recipe) -> str:
    """ "delayed", "current" or "block"; ValueError for recipes whose tensors are not FP8."""
    scaling = family_of(recipe).attention
    if scaling is not None:
        return scaling
    raise ValueError(
        f"{type(recipe).__name__} has no FP8 attention; set NVTE_DPA_FP8_RECIPE=DelayedScaling or "
        "Float8CurrentScaling with NVTE_DPA_FP8_RECIPE_DPA=1, or leave fp8_dpa and fp8_mha False"
    )
