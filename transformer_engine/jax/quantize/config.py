"""Which recipe is in force, and what follows from it.

A recipe is read where a module is traced. What jax.jit has traced before is not traced again under another recipe: a
function is to be jitted, or called first, inside the block whose recipe it is to have.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from flax.core.frozen_dict import FrozenDict

from ...common.checks import described, member, refuse_keywords, switch
from ...common.recipe import DelayedScaling, Recipe
from .. import sharding
from ..blocks import reusable
from ..platform import compute_capability
from ..sharding import MeshResource
from . import recipes
from .lifted import merged_over_lifted_calls
from .scaling_modes import AmaxComputeAlgo, ScalingMode, TensorSource

NVTE_FP8_COLLECTION_NAME = "fp8_metas"

_recipe: ContextVar[Recipe | None] = ContextVar("transformer_engine_jax_recipe", default=None)


def get_global_quantize_recipe() -> Recipe | None:
    """The recipe of the innermost enabled autocast; None where nothing is quantized."""
    return _recipe.get()


def get_device_compute_capability(gpu_id: int = 0) -> int:
    """Ten times the compute capability of a local GPU; 90 on a CPU, where the rules of Hopper hold."""
    return compute_capability(gpu_id)


@reusable
def autocast(
    enabled: bool = False,
    recipe: Recipe | None = None,
    mesh_resource: MeshResource | None = None,
    **others: Any,
) -> Iterator[None]:
    """Quantize the products of the layers that are traced in this block.

    enabled         False switches quantization off, also inside of an enabled block
    recipe          which formats and scales; None: DelayedScaling()
    mesh_resource   what the axes of the mesh are for; None: as outside of the block
    One object may be entered several times, within itself too.
    Raises ValueError for a recipe that this machine, or JAX's side, does not compute.
    """
    refuse_keywords("autocast", others, {"fp8_recipe": "recipe"})
    switch("enabled", enabled)
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(
            f"recipe={described(recipe)} is a {type(recipe).__name__}; pass an instance of a class of "
            "transformer_engine.common.recipe, or None"
        )
    chosen = None
    if enabled:
        chosen = DelayedScaling() if recipe is None else recipe
        family = recipes.checked_family(chosen)
        if (reason := recipes.refusal_of(family)) is not None:
            raise ValueError(reason)
    # An empty MeshResource in its place would let layers under a mesh leave every tensor where it lies, in silence.
    guard = nullcontext() if mesh_resource is None else sharding.global_shard_guard(mesh_resource)
    stateful = chosen is not None and recipes.family_of(chosen).stateful
    states = merged_over_lifted_calls() if stateful else nullcontext()
    token = _recipe.set(chosen)
    try:
        with guard, states:
            yield
    finally:
        _recipe.reset(token)


@reusable
def fp8_autocast(
    enabled: bool = False, fp8_recipe: Recipe | None = None, mesh_resource: MeshResource | None = None
) -> Iterator[None]:
    """autocast under its former name."""
    warnings.warn(
        "fp8_autocast is deprecated; use autocast(enabled=.., recipe=..)", DeprecationWarning, stacklevel=4
    )
    with autocast(enabled=enabled, recipe=fp8_recipe, mesh_resource=mesh_resource):
        yield


@dataclass(frozen=True)
class QuantizeConfig:
    """What modules ask of a recipe; without one nothing is quantized."""

    recipe: Recipe | None

    COLLECTION_NAME = NVTE_FP8_COLLECTION_NAME

    def is_fp8_enabled(self) -> bool:
        """Is anything quantized?"""
        return self.recipe is not None

    def get_scaling_mode(self, source: TensorSource) -> ScalingMode:
        """How one tensor of a linear layer is scaled."""
        if self.recipe is None:
            return ScalingMode.NO_SCALING
        return recipes.family_of(self.recipe).modes(self.recipe, source)

    @property
    def stateful(self) -> bool:
        """Has the recipe amax histories and scales?"""
        return self.recipe is not None and recipes.family_of(self.recipe).stateful

    @property
    def random(self) -> bool:
        """Does the recipe round gradients by random numbers?"""
        return self.recipe is not None and recipes.family_of(self.recipe).random(self.recipe)

    @property
    def FWD_DTYPE(self) -> Any:
        """dtype of the codes of inputs and kernels."""
        return (
            recipes.format_dtypes(None)[0] if self.recipe is None else recipes.element_types(self.recipe)[0]
        )

    @property
    def BWD_DTYPE(self) -> Any:
        """dtype of the codes of gradients."""
        return (
            recipes.format_dtypes(None)[1] if self.recipe is None else recipes.element_types(self.recipe)[1]
        )

    @property
    def MARGIN(self) -> float:
        return float(getattr(self.recipe, "margin", 0.0))

    @property
    def AMAX_HISTORY_LEN(self) -> int:
        """Steps that a history holds; 0 for a recipe without a state."""
        return int(getattr(self.recipe, "amax_history_len", 0))

    @property
    def INITIALIZED(self) -> bool:
        """Was a recipe given?"""
        return self.recipe is not None

    @property
    def DISABLE_STOCHASTIC_ROUNDING(self) -> bool:
        """Does an NVFP4 recipe round gradients to nearest?"""
        return bool(getattr(self.recipe, "disable_stochastic_rounding", False))

    @property
    def DISABLE_RHT(self) -> bool:
        """Does an NVFP4 recipe leave out the random Hadamard transform?"""
        return bool(getattr(self.recipe, "disable_rht", False))

    @property
    def DISABLE_2D_QUANTIZATION(self) -> bool:
        """Does an NVFP4 recipe scale kernels in one dimension?"""
        return bool(getattr(self.recipe, "disable_2d_quantization", False))

    @property
    def AMAX_COMPUTE_ALGO(self) -> AmaxComputeAlgo:
        return AmaxComputeAlgo(getattr(self.recipe, "amax_compute_algo", "max"))


def get_quantize_config_with_recipe(fp8_recipe: Recipe | None) -> QuantizeConfig:
    """Return the settings that modules read of a recipe."""
    return QuantizeConfig(fp8_recipe)


def get_quantization_recipe(recipe_name: str) -> Recipe:
    """Return a new recipe of a class of transformer_engine.common.recipe, by the name of the class."""
    for cls in recipes.FAMILIES:
        if cls.__name__ == recipe_name:
            return cls()
    raise ValueError(
        f"recipe_name={recipe_name!r} is not a recipe; choose one of {', '.join(c.__name__ for c in recipes.FAMILIES)}"
    )


def is_quantize_recipe_supported(recipe_name: str) -> tuple[bool, str]:
    """Return whether this machine computes the recipe of that name, and otherwise why not."""
    reason = recipes.refusal_of(recipes.family_of(get_quantization_recipe(recipe_name)))
    return reason is None, reason or ""


def get_supported_quantization_recipes() -> list[Recipe]:
    """One instance of every recipe that this machine computes."""
    return [cls() for cls, family in recipes.FAMILIES.items() if recipes.refusal_of(family) is None]


def is_scaling_mode_supported(scaling_mode: ScalingMode, gpu_id: int = 0) -> tuple[bool, str]:
    """(can a GPU, or a CPU by emulation, compute the mode, why not)."""
    member("scaling_mode", scaling_mode, ScalingMode)
    if scaling_mode is ScalingMode.NO_SCALING:
        return True, ""
    for cls, family in recipes.FAMILIES.items():
        modes = {family.modes(cls(), source) for source in TensorSource}
        if any(mode.format == scaling_mode.format and _same_kind(mode, scaling_mode) for mode in modes):
            reason = recipes.refusal_of(family, gpu_id)
            return reason is None, reason or ""
    raise AssertionError(f"{scaling_mode} belongs to no recipe")


def _same_kind(first: ScalingMode, second: ScalingMode) -> bool:
    return not first.is_tensor_scaling() or first is second


def get_supported_scaling_modes() -> list[ScalingMode]:
    """The modes, no scaling apart, that this machine computes."""
    quantizing = [mode for mode in ScalingMode if mode is not ScalingMode.NO_SCALING]
    return [mode for mode in quantizing if is_scaling_mode_supported(mode)[0]]


def is_fp8_available(
    scaling_mode: ScalingMode = ScalingMode.DELAYED_TENSOR_SCALING, gpu_id: int | None = None
) -> tuple[bool, str]:
    """is_scaling_mode_supported under its former name."""
    warnings.warn(
        "is_fp8_available is deprecated; use is_scaling_mode_supported", DeprecationWarning, stacklevel=2
    )
    return is_scaling_mode_supported(scaling_mode, 0 if gpu_id is None else gpu_id)


def update_collections(new: Mapping[str, Any], original: Mapping[str, Any]) -> Mapping[str, Any]:
    """Keys of new, then the rest of original, as a dict or a FrozenDict like original."""
    for name, value in (("new", new), ("original", original)):
        if not isinstance(value, (dict, FrozenDict)):
            raise TypeError(
                f"{name}={described(value)} is a {type(value).__name__}; give a dict or a FrozenDict"
            )
    merged = {**new, **{key: value for key, value in original.items() if key not in new}}
    return FrozenDict(merged) if isinstance(original, FrozenDict) else merged
