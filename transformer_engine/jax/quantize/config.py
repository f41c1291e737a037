"""The current recipe, its settings, and the recipes and scaling modes that the machine supports.

Modules read the recipe while they are traced. jax.jit does not retrace a function under another recipe: create the
jitted function, or call it for the first time, inside the block of its recipe.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

from flax.core.frozen_dict import FrozenDict

from ...common.checks import (
    accepts_former_keywords,
    described,
    member,
    reject_keywords,
    suggests_keywords,
    switch,
)
from ...common.numbers import with_article
from ...common.recipe import DelayedScaling, Recipe, reject_recipe_as_enabled
from .. import sharding
from ..runtime.blocks import Arguments, ReusableContext, reusable
from ..runtime.platform import compute_capability, hardware
from ..sharding import MeshResource
from . import recipes
from .lifted import merge_lifted_calls
from .scaling_modes import AmaxComputeAlgo, ScalingMode, TensorSource

NVTE_FP8_COLLECTION_NAME = "fp8_metas"

_recipe: ContextVar[Recipe | None] = ContextVar("transformer_engine_jax_recipe", default=None)


def get_global_quantize_recipe() -> Recipe | None:
    """The innermost enabled autocast's recipe, or None outside autocast."""
    return _recipe.get()


def get_device_compute_capability(gpu_id: int = 0) -> int:
    """Ten times the compute capability of a local GPU; 90 on a CPU, which follows the rules for Hopper.

    Args:
        gpu_id: GPU index in this process.

    Raises:
        TypeError: gpu_id is not an integer.
        ValueError: The process has no GPU with that number.
    """
    return compute_capability(gpu_id)


def is_fp8_gemm_with_all_layouts_supported() -> bool:
    """Whether FP8 matrix products read operands that are contracted over any axis.

    Otherwise they read operands that are contracted over the last axis alone, so that quantizers store both tensor
    directions by default.
    """
    return hardware().has("fp8 products in all layouts by xla")


def _hints_at_default(
    block: Callable[Arguments, ReusableContext],
) -> Callable[Arguments, ReusableContext]:
    """Decorate `autocast`: warn of a recipe without `enabled`, which quantizes in PyTorch and not in JAX."""

    @functools.wraps(block)
    def hinted(*args: Arguments.args, **kwargs: Arguments.kwargs) -> ReusableContext:
        if not args and "enabled" not in kwargs and kwargs.get("recipe") is not None:
            warnings.warn(
                "autocast(recipe=..) of transformer_engine.jax computes in high precision, because enabled is False by "
                "default, as in the original (in transformer_engine.pytorch it is True); pass enabled=True to quantize "
                "or enabled=False to silence this warning",
                UserWarning,
                stacklevel=2,
            )
        return block(*args, **kwargs)

    return hinted


@_hints_at_default
@reusable
def autocast(
    enabled: bool = False,
    recipe: Recipe | None = None,
    mesh_resource: MeshResource | None = None,
    **others: NoReturn,
) -> Iterator[None]:
    """Quantize the matrix products in layers that are traced in this block.

    The returned context manager is reusable and reentrant.

    Args:
        enabled: Whether to quantize; False disables quantization inside an enabled block. The default is False, as in
            NVIDIA's engine; `transformer_engine.pytorch` has the default True. A recipe without `enabled` warns.
        recipe: Formats and scaling; None means DelayedScaling().
        mesh_resource: Uses for the mesh axes; None keeps the settings outside the block.
        **others: No other keyword is accepted.

    Raises:
        TypeError: recipe is not an instance of a recipe class.
        ValueError: The machine, or transformer_engine.jax, does not support the recipe or a recipe setting.
    """
    reject_keywords(
        "autocast", others, {"fp8_recipe": "recipe"}, ("enabled", "recipe", "mesh_resource")
    )
    reject_recipe_as_enabled(enabled)
    switch("enabled", enabled)
    _check_recipe("recipe", recipe)
    chosen = None
    if enabled:
        chosen = DelayedScaling() if recipe is None else recipe
        family = recipes.check_family(chosen)
        if (reason := recipes.unsupported_reason(family)) is not None:
            raise ValueError(reason)
    # An empty MeshResource instead would silently disable the sharding constraints of layers under a mesh.
    guard = nullcontext() if mesh_resource is None else sharding.global_shard_guard(mesh_resource)
    stateful = chosen is not None and recipes.find_family(chosen).stateful
    states = merge_lifted_calls() if stateful else nullcontext()
    token = _recipe.set(chosen)
    try:
        with guard, states:
            yield
    finally:
        _recipe.reset(token)


@suggests_keywords
@reusable
def fp8_autocast(
    enabled: bool = False,
    fp8_recipe: Recipe | None = None,
    mesh_resource: MeshResource | None = None,
) -> Iterator[None]:
    """Deprecated name for `autocast`.

    Args:
        enabled: Quantize.
        fp8_recipe: The recipe; `autocast` calls it recipe.
        mesh_resource: Uses for the mesh axes.
    """
    warnings.warn(
        "fp8_autocast is deprecated; use autocast(enabled=.., recipe=..)",
        DeprecationWarning,
        stacklevel=4,
    )
    with autocast(enabled=enabled, recipe=fp8_recipe, mesh_resource=mesh_resource):
        yield


@dataclass(frozen=True)
class QuantizeConfig:
    """Settings that modules read from a recipe; without a recipe they quantize nothing.

    Args:
        recipe: The recipe, or None.
    """

    recipe: Recipe | None

    COLLECTION_NAME = NVTE_FP8_COLLECTION_NAME

    def is_fp8_enabled(self) -> bool:
        """Whether modules quantize."""
        return self.recipe is not None

    def get_scaling_mode(self, source: TensorSource) -> ScalingMode:
        """Scaling mode for one tensor in a linear layer."""
        member("source", source, TensorSource)
        if self.recipe is None:
            return ScalingMode.NO_SCALING
        return recipes.find_family(self.recipe).modes(self.recipe, source)

    @property
    def stateful(self) -> bool:
        """Whether the recipe has scales and histories of maxima as state."""
        return self.recipe is not None and recipes.find_family(self.recipe).stateful

    @property
    def random(self) -> bool:
        """Whether the recipe rounds gradients stochastically."""
        return self.recipe is not None and recipes.find_family(self.recipe).random(self.recipe)

    @property
    def FWD_DTYPE(self) -> Any:
        """Code dtype for inputs and kernels; bfloat16 without a recipe."""
        return (
            recipes.format_dtypes(None)[0]
            if self.recipe is None
            else recipes.element_types(self.recipe)[0]
        )

    @property
    def BWD_DTYPE(self) -> Any:
        """Code dtype for gradients; bfloat16 without a recipe."""
        return (
            recipes.format_dtypes(None)[1]
            if self.recipe is None
            else recipes.element_types(self.recipe)[1]
        )

    @property
    def MARGIN(self) -> float:
        """Scales are divided by two to this power."""
        return float(getattr(self.recipe, "margin", 0.0))

    @property
    def AMAX_HISTORY_LEN(self) -> int:
        """Steps in an amax history; 0 for a recipe without state."""
        return int(getattr(self.recipe, "amax_history_len", 0))

    @property
    def INITIALIZED(self) -> bool:
        """Whether the settings come from a recipe."""
        return self.recipe is not None

    @property
    def DISABLE_STOCHASTIC_ROUNDING(self) -> bool:
        """Whether an NVFP4 recipe rounds gradients to nearest."""
        return bool(getattr(self.recipe, "disable_stochastic_rounding", False))

    @property
    def DISABLE_RHT(self) -> bool:
        """Whether an NVFP4 recipe omits the random Hadamard transform."""
        return bool(getattr(self.recipe, "disable_rht", False))

    @property
    def DISABLE_2D_QUANTIZATION(self) -> bool:
        """Whether an NVFP4 recipe scales kernels in one-dimensional blocks."""
        return bool(getattr(self.recipe, "disable_2d_quantization", False))

    @property
    def AMAX_COMPUTE_ALGO(self) -> AmaxComputeAlgo:
        """Amax history element that determines the scale."""
        return AmaxComputeAlgo(getattr(self.recipe, "amax_compute_algo", "max"))


def get_quantize_config() -> QuantizeConfig:
    """Settings from the innermost enabled autocast's recipe; without one they quantize nothing."""
    return QuantizeConfig(get_global_quantize_recipe())


def get_quantize_config_with_recipe(fp8_recipe: Recipe | None) -> QuantizeConfig:
    """Settings that modules read from a recipe.

    Args:
        fp8_recipe: The recipe, or None.

    Raises:
        TypeError: fp8_recipe is neither None nor a recipe instance.
    """
    _check_recipe("fp8_recipe", fp8_recipe)
    return QuantizeConfig(fp8_recipe)


def _check_recipe(name: str, recipe: Any) -> None:
    """Raise TypeError unless a value is None or a recipe."""
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(
            f"{name}={described(recipe)} is {with_article(type(recipe))}; pass an instance of a class of "
            "transformer_engine.common.recipe, or None"
        )


@accepts_former_keywords(recipe_name="name")
def get_quantization_recipe(name: str) -> Recipe:
    """Create a recipe with default settings.

    Args:
        name: Class name in transformer_engine.common.recipe, such as "DelayedScaling".

    Raises:
        ValueError: transformer_engine.jax has no recipe with that name.
    """
    classes = {cls.__name__: cls for cls in recipes.FAMILIES}
    if not isinstance(name, str) or name not in classes:
        raise ValueError(
            f"name={described(name)} is not a recipe; choose one of {', '.join(classes)}"
        )
    return classes[name]()


def is_quantize_recipe_supported(recipe_name: str) -> tuple[bool, str]:
    """Whether this machine supports a recipe, and otherwise the reason.

    Args:
        recipe_name: Recipe class name, for example "MXFP8BlockScaling".
    """
    reason = recipes.unsupported_reason(recipes.find_family(get_quantization_recipe(recipe_name)))
    return reason is None, reason or ""


def get_supported_quantization_recipes() -> list[Recipe]:
    """Create one instance for every recipe that this machine supports."""
    return [
        cls()
        for cls, family in recipes.FAMILIES.items()
        if recipes.unsupported_reason(family) is None
    ]


def is_scaling_mode_supported(scaling_mode: ScalingMode, gpu_id: int = 0) -> tuple[bool, str]:
    """Whether a GPU, or a CPU by emulation, supports a scaling mode, and otherwise the reason.

    Args:
        scaling_mode: The scaling mode.
        gpu_id: GPU index in this process.
    """
    member("scaling_mode", scaling_mode, ScalingMode)
    if scaling_mode is ScalingMode.NO_SCALING:
        return True, ""
    for cls, family in recipes.FAMILIES.items():
        modes = {family.modes(cls(), source) for source in TensorSource}
        # Delayed and current scaling have the same dtypes, so tensor scaling requires the same mode. Block-format
        # variants that the recipe's defaults do not use have the dtypes of the format.
        if scaling_mode in modes or (
            scaling_mode.is_block_scaling()
            and any(
                mode.is_block_scaling() and _dtypes(mode) == _dtypes(scaling_mode) for mode in modes
            )
        ):
            reason = recipes.unsupported_reason(family, gpu_id)
            return reason is None, reason or ""
    raise AssertionError(f"no recipe has the scaling mode {scaling_mode}")


def _dtypes(scaling_mode: ScalingMode) -> tuple[Any, ...]:
    """Dtypes for a scaling mode's codes and scales."""
    return (*scaling_mode.get_compatible_q_dtypes(), scaling_mode.get_scale_dtype())


def get_supported_scaling_modes() -> list[ScalingMode]:
    """Scaling modes that this machine supports, except NO_SCALING."""
    quantizing = [mode for mode in ScalingMode if mode is not ScalingMode.NO_SCALING]
    return [mode for mode in quantizing if is_scaling_mode_supported(mode)[0]]


def is_fp8_available(
    scaling_mode: ScalingMode = ScalingMode.DELAYED_TENSOR_SCALING, gpu_id: int | None = None
) -> tuple[bool, str]:
    """Deprecated name for `is_scaling_mode_supported`.

    Args:
        scaling_mode: The scaling mode.
        gpu_id: GPU index; None is 0.
    """
    warnings.warn(
        "is_fp8_available is deprecated; use is_scaling_mode_supported",
        DeprecationWarning,
        stacklevel=2,
    )
    return is_scaling_mode_supported(scaling_mode, 0 if gpu_id is None else gpu_id)


@suggests_keywords
def update_collections(new: Mapping[str, Any], original: Mapping[str, Any]) -> Mapping[str, Any]:
    """Merge new's entries into original, as a dict or FrozenDict like original.

    Args:
        new: Collections to insert.
        original: Collections of the model.

    Raises:
        TypeError: An argument is neither a dict nor a FrozenDict.
    """
    for name, value in (("new", new), ("original", original)):
        if not isinstance(value, (dict, FrozenDict)):
            raise TypeError(
                f"{name}={described(value)} is {with_article(type(value))}; pass a dict or a FrozenDict"
            )
    merged = {**new, **{key: value for key, value in original.items() if key not in new}}
    return FrozenDict(merged) if isinstance(original, FrozenDict) else merged
