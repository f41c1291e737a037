"""Quantizers and sets of them: by mode and dtype, or by a recipe and its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from ...common.checks import member, refuse_keywords, switch, whole
from ...common.recipe import Recipe
from ..checks import check_dtype
from ..platform import compute_capability
from . import recipes
from .config import get_global_quantize_recipe
from .grouped import GroupedQuantizer
from .quantizers import DelayedScaleQuantizer, Quantizer, QuantizerSet, noop_quantizer_set
from .scaling_modes import QuantizeLayout, ScalingMode, TensorSource

_MOST = 1 << 16  # quantizers of one call: with their histories of 1024 steps 256 MiB
_NATIVE_BLOCKS = 100  # from this compute capability on a product reads FP8 operands in any order of axes


@dataclass
class QuantizeMeta:
    """The state of one tensor's quantizer: arrays by the names of the quantizer's fields."""

    state: dict[str, Array]

    def __init__(self, **state: Array):
        self.state = state

    def get_kwargs_dictionary(self) -> dict[str, Array]:
        """Keyword arguments for the quantizer."""
        return dict(self.state)


@dataclass
class QuantizeMetaSet:
    """The states of a linear layer's input, kernel and output gradient."""

    x: QuantizeMeta
    kernel: QuantizeMeta
    grad: QuantizeMeta


class QuantizerFactory:
    """Makes quantizers."""

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
        """One quantizer, or a tuple of several; NO_SCALING gives None; n_groups gives GroupedQuantizers.

        Raises ValueError for n_quantizers or n_groups below 1 or above 65536.
        """
        _check_counts(n_quantizers=n_quantizers, n_groups=n_groups)
        made = tuple(
            _of_groups(_one(scaling_mode, q_dtype, q_layout, checkpoint_name, kwargs), n_groups)
            for _ in range(n_quantizers)
        )
        return made[0] if n_quantizers == 1 else made

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
        """One set of quantizers, or a tuple of several.

        By scaling_mode with fwd_dtype and bwd_dtype, by fp8_recipe with quantize_meta_set, or by the recipe of
        autocast; without any of these nothing is quantized.
        is_2x2x    make both directions of every tensor; None: where products need them
        """
        _check_counts(n_quantizer_sets=n_quantizer_sets, n_groups=n_groups)
        refuse_keywords("QuantizerFactory.create_set", kwargs.keys() - {"quantize_meta_set"}, {})
        switch("is_2x2x", is_2x2x)
        if scaling_mode is not None and fp8_recipe is not None:
            raise ValueError(
                f"scaling_mode={scaling_mode} and fp8_recipe={fp8_recipe!r} exclude each other; give one of them"
            )
        metas: QuantizeMetaSet | None = kwargs.get("quantize_meta_set")
        if fp8_recipe is not None and metas is None:
            raise ValueError(
                "fp8_recipe was given without quantize_meta_set; give the states of its quantizers"
            )
        recipe = (
            fp8_recipe if fp8_recipe is not None or scaling_mode is not None else get_global_quantize_recipe()
        )
        if recipe is not None:
            sets = tuple(_of_recipe(recipe, is_2x2x, checkpoint_name, metas) for _ in range(n_quantizer_sets))
        elif scaling_mode is None or scaling_mode is ScalingMode.NO_SCALING:
            sets = (noop_quantizer_set,) * n_quantizer_sets
        else:
            member("scaling_mode", scaling_mode, ScalingMode)
            dtypes = (fwd_dtype, fwd_dtype, bwd_dtype)
            sets = tuple(
                QuantizerSet(
                    *[
                        _one(scaling_mode, d, _layout(scaling_mode, is_2x2x), checkpoint_name, {})
                        for d in dtypes
                    ]
                )
                for _ in range(n_quantizer_sets)
            )
        if n_groups is not None:
            sets = tuple(
                QuantizerSet(*[_of_groups(q, n_groups) for q in (s.x, s.kernel, s.dgrad)]) for s in sets
            )
        return sets[0] if n_quantizer_sets == 1 else sets


def _check_counts(**counts: int | None) -> None:
    """TypeError or ValueError unless these are whole numbers from 1 to 65536; n_groups may be None."""
    for name, count in counts.items():
        if name == "n_groups" and count is None:
            continue
        whole(name, count)
        if count is not None and count > _MOST:
            raise ValueError(f"{name}={count} is above {_MOST}; give a whole number from 1 to {_MOST}")


def _one(
    mode: ScalingMode | None,
    q_dtype: Any,
    layout: QuantizeLayout | None,
    checkpoint_name: str | None,
    options: dict[str, Any],
) -> Quantizer | None:
    if mode is None:
        return None
    member("scaling_mode", mode, ScalingMode)
    if layout is not None:
        member("q_layout", layout, QuantizeLayout)
    if mode is ScalingMode.NO_SCALING:
        return None
    if q_dtype is None:
        raise ValueError(f"scaling_mode={mode} without a dtype of the codes; give q_dtype")
    return recipes.QUANTIZERS[mode](  # pyright: ignore[reportCallIssue]
        q_dtype=check_dtype("q_dtype", q_dtype),
        scaling_mode=mode,
        q_layout=QuantizeLayout.ROWWISE_COLWISE if layout is None else layout,
        data_layout=mode.data_layout,
        checkpoint_name=checkpoint_name,
        **options,
    )


def _layout(mode: ScalingMode, both: bool | None) -> QuantizeLayout:
    if both is None:
        both = mode.is_block_scaling() or compute_capability() < _NATIVE_BLOCKS
    return QuantizeLayout.ROWWISE_COLWISE if both else QuantizeLayout.ROWWISE


def _of_recipe(
    recipe: Recipe, both: bool | None, checkpoint_name: str | None, metas: QuantizeMetaSet | None
) -> QuantizerSet:
    family = recipes.family_of(recipe)
    family.check(recipe)
    states = (None, None, None) if metas is None else (metas.x, metas.kernel, metas.grad)
    made = [
        recipes.make_quantizer(
            recipe,
            source,
            _layout(family.modes(recipe, source), both),
            checkpoint_name,
            **({} if state is None else state.get_kwargs_dictionary()),
        )
        for source, state in zip(TensorSource, states, strict=True)
    ]
    return QuantizerSet(*made)


def _of_groups(quantizer: Quantizer | None, n_groups: int | None) -> Quantizer | GroupedQuantizer | None:
    """The quantizer for several groups; a state that belongs to one tensor becomes that of every group."""
    if quantizer is None or n_groups is None:
        return quantizer
    if isinstance(quantizer, DelayedScaleQuantizer) and quantizer.amax_history.ndim == 1:
        quantizer.scale = jnp.broadcast_to(quantizer.scale, (n_groups,))
        quantizer.amax_history = jnp.broadcast_to(
            quantizer.amax_history, (n_groups, *quantizer.amax_history.shape)
        )
    return GroupedQuantizer(quantizer, n_groups)
