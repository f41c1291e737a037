"""Factories for quantizers and quantizer sets, from a mode and dtypes or from a recipe and its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from ...common.checks import member, reject_keywords, switch, whole
from ...common.recipe import Recipe
from ..runtime.checks import check_dtype
from . import recipes
from .config import get_global_quantize_recipe, is_fp8_gemm_with_all_layouts_supported
from .grouped import GroupedQuantizer
from .quantizers import DelayedScaleQuantizer, Quantizer, QuantizerSet, noop_quantizer_set
from .scaling_modes import QuantizeLayout, ScalingMode, TensorSource

_MOST = 1 << 16  # quantizers per call; their 1024-step histories use 256 MiB


@dataclass
class QuantizeMeta:
    """One tensor's quantizer state: arrays, keyed by the quantizer's field names.

    Args:
        state: Arrays by the quantizer's field names.
    """

    state: dict[str, Array]

    def __init__(self, **state: Array):
        self.state = state

    def get_kwargs_dictionary(self) -> dict[str, Array]:
        """State as keyword arguments for the quantizer."""
        return dict(self.state)


@dataclass
class QuantizeMetaSet:
    """Quantizer states for a linear layer's input, kernel and output gradient.

    Args:
        x: State for the input quantizer.
        kernel: State for the kernel quantizer.
        grad: State for the gradient quantizer.
    """

    x: QuantizeMeta
    kernel: QuantizeMeta
    grad: QuantizeMeta


class QuantizerFactory:
    """Creates quantizers and quantizer sets."""

    @staticmethod
    def create(
        n_quantizers: int = 1,
        scaling_mode: ScalingMode | None = None,
        q_dtype: Any = None,
        q_layout: QuantizeLayout | None = None,
        n_groups: int | None = None,
        checkpoint_name: str | None = None,
        **kwargs: Any,
    ) -> Quantizer | GroupedQuantizer | tuple[Quantizer | GroupedQuantizer | None, ...] | None:
        """Create quantizers with one scaling mode.

        Args:
            n_quantizers: Number of quantizers.
            scaling_mode: Scaling mode; None and NO_SCALING create None instead of a quantizer.
            q_dtype: Code dtype.
            q_layout: Stored directions; None means both.
            n_groups: Number of groups per GroupedQuantizer; None creates single-tensor quantizers.
            checkpoint_name: Code and scale name for recomputation policies.
            **kwargs: Further quantizer fields.

        Returns:
            One quantizer if n_quantizers is 1, otherwise a tuple.

        Raises:
            ValueError: n_quantizers or n_groups is below 1 or above 65536, or q_dtype is missing.
        """
        _check_count("n_quantizers", n_quantizers)
        if n_groups is not None:
            _check_count("n_groups", n_groups)
        results = tuple(
            _repeat_for_groups(
                _create_quantizer(scaling_mode, q_dtype, q_layout, checkpoint_name, kwargs),
                n_groups,
            )
            for _ in range(n_quantizers)
        )
        return results[0] if n_quantizers == 1 else results

    @staticmethod
    def create_set(
        n_quantizer_sets: int = 1,
        scaling_mode: ScalingMode | None = None,
        fwd_dtype: Any = None,
        bwd_dtype: Any = None,
        is_2x2x: bool | None = None,
        n_groups: int | None = None,
        checkpoint_name: str | None = None,
        fp8_recipe: Recipe | None = None,
        **kwargs: Any,
    ) -> QuantizerSet | tuple[QuantizerSet, ...]:
        """Create quantizer sets for linear layers.

        The quantizers follow scaling_mode, fp8_recipe, or the recipe of autocast, in this order. Without any of these
        the set quantizes nothing.

        Args:
            n_quantizer_sets: Number of sets.
            scaling_mode: Scaling mode for all three quantizers; excludes fp8_recipe.
            fwd_dtype: Code dtype for inputs and kernels.
            bwd_dtype: Code dtype for gradients.
            is_2x2x: Whether to store both directions for every tensor; None stores the ones that matrix products read.
            n_groups: Number of groups; None creates single-tensor quantizers.
            checkpoint_name: Code and scale name for recomputation policies.
            fp8_recipe: Recipe; requires quantize_meta_set.
            **kwargs: quantize_meta_set, a QuantizeMetaSet with the states of the quantizers.

        Returns:
            One set if n_quantizer_sets is 1, otherwise a tuple.

        Raises:
            ValueError: A count is below 1 or above 65536, scaling_mode and fp8_recipe are both given, or
                quantize_meta_set is missing.
        """
        _check_count("n_quantizer_sets", n_quantizer_sets)
        if n_groups is not None:
            _check_count("n_groups", n_groups)
        unknown = kwargs.keys() - {"quantize_meta_set"}
        reject_keywords("QuantizerFactory.create_set", unknown, {}, ("quantize_meta_set",))
        switch("is_2x2x", is_2x2x)
        if scaling_mode is not None and fp8_recipe is not None:
            raise ValueError(
                f"scaling_mode={scaling_mode} and fp8_recipe={fp8_recipe!r} exclude each other; pass one of them"
            )
        metas: QuantizeMetaSet | None = kwargs.get("quantize_meta_set")
        if fp8_recipe is not None and metas is None:
            raise ValueError(
                "fp8_recipe requires quantize_meta_set, which is None; pass the states of the quantizers"
            )
        recipe = fp8_recipe
        if fp8_recipe is None and scaling_mode is None:
            recipe = get_global_quantize_recipe()
        if recipe is not None:
            sets = tuple(
                _recipe_quantizers(recipe, is_2x2x, checkpoint_name, metas)
                for _ in range(n_quantizer_sets)
            )
        elif scaling_mode is None or scaling_mode is ScalingMode.NO_SCALING:
            sets = (noop_quantizer_set,) * n_quantizer_sets
        else:
            member("scaling_mode", scaling_mode, ScalingMode)
            dtypes = (fwd_dtype, fwd_dtype, bwd_dtype)
            sets = tuple(
                QuantizerSet(
                    *[
                        _create_quantizer(
                            scaling_mode, d, _layout(scaling_mode, is_2x2x), checkpoint_name, {}
                        )
                        for d in dtypes
                    ]
                )
                for _ in range(n_quantizer_sets)
            )
        if n_groups is not None:
            sets = tuple(
                QuantizerSet(*[_repeat_for_groups(q, n_groups) for q in (s.x, s.kernel, s.dgrad)])
                for s in sets
            )
        return sets[0] if n_quantizer_sets == 1 else sets


def _check_count(name: str, count: int) -> None:
    """Raise TypeError or ValueError unless a count is an integer from 1 to 65536."""
    whole(name, count)
    if count > _MOST:
        raise ValueError(f"{name}={count} is above {_MOST}; pass an integer from 1 to {_MOST}")


def _create_quantizer(
    mode: ScalingMode | None,
    q_dtype: Any,
    layout: QuantizeLayout | None,
    checkpoint_name: str | None,
    options: dict[str, Any],
) -> Quantizer | None:
    """Create a single-tensor quantizer, or None without a scaling mode."""
    if mode is None:
        return None
    member("scaling_mode", mode, ScalingMode)
    if layout is not None:
        member("q_layout", layout, QuantizeLayout)
    if mode is ScalingMode.NO_SCALING:
        return None
    if q_dtype is None:
        raise ValueError(
            f"scaling_mode={mode} requires q_dtype, which is None; pass the dtype of the codes"
        )
    return recipes.QUANTIZERS[mode](
        q_dtype=check_dtype("q_dtype", q_dtype),
        scaling_mode=mode,
        q_layout=QuantizeLayout.ROWWISE_COLWISE if layout is None else layout,
        data_layout=mode.data_layout,
        checkpoint_name=checkpoint_name,
        **options,
    )


def _layout(mode: ScalingMode, both: bool | None) -> QuantizeLayout:
    """Directions that a tensor stores; None stores the ones that matrix products read."""
    if both is None:
        both = mode.is_block_scaling() or not is_fp8_gemm_with_all_layouts_supported()
    return QuantizeLayout.ROWWISE_COLWISE if both else QuantizeLayout.ROWWISE


def _recipe_quantizers(
    recipe: Recipe, both: bool | None, checkpoint_name: str | None, metas: QuantizeMetaSet | None
) -> QuantizerSet:
    """Create the quantizers that a recipe requires for a linear layer, with given states."""
    family = recipes.check_family(recipe)
    states = (None, None, None) if metas is None else (metas.x, metas.kernel, metas.grad)
    quantizers = [
        recipes.make_quantizer(
            recipe,
            source,
            _layout(family.modes(recipe, source), both),
            checkpoint_name,
            **({} if state is None else state.get_kwargs_dictionary()),
        )
        for source, state in zip(TensorSource, states, strict=True)
    ]
    return QuantizerSet(*quantizers)


def _repeat_for_groups(
    quantizer: Quantizer | None, n_groups: int | None
) -> Quantizer | GroupedQuantizer | None:
    """Create a quantizer for several groups; a single tensor's state is repeated for every group."""
    if quantizer is None or n_groups is None:
        return quantizer
    if isinstance(quantizer, DelayedScaleQuantizer) and quantizer.amax_history.ndim == 1:
        quantizer.scale = jnp.broadcast_to(quantizer.scale, (n_groups,))
        quantizer.amax_history = jnp.broadcast_to(
            quantizer.amax_history, (n_groups, *quantizer.amax_history.shape)
        )
    return GroupedQuantizer(quantizer, n_groups)
