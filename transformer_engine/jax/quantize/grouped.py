"""Quantizers for grouped matrices: rows [M, K] in ragged groups, or a stack [G, *rows, *columns].

Every group is quantized as a separate tensor: it has its own scale, or its own blocks and second level.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...common.checks import integer, switch
from ..primitives import exact
from ..primitives.grouped_quantize import group_of_rows, quantize_rows, quantize_stack
from ..primitives.quantize import scale_from_amax
from ..primitives.quantize.tiles import materialize_scales
from ..runtime.checks import check_floating, check_instance, check_sizes, check_values
from ..runtime.code_bits import name_leaves
from ..runtime.undifferentiated import constant, undifferentiated
from .grouped_blocks import encode_rows
from .grouped_tensors import GroupedNoScaleTensor, GroupedScaledTensor1x
from .quantizers import DelayedScaleQuantizer, Quantizer, QuantizerSet, advanced_together
from .scaling_modes import ScalingMode
from .settings import find_element
from .tensors import ScaledTensor2x, positive_axis

__all__ = [
    "GroupedNoScaleTensor",
    "GroupedQuantizer",
    "GroupedScaledTensor1x",
    "check_ungrouped",
    "group_of_rows",
    "groups_advanced_together",
]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["quantizer"], meta_fields=["n_groups"]
)
@dataclass
class GroupedQuantizer:
    """Quantizer for n_groups tensors.

    Attributes:
        quantizer: Settings for all groups; for delayed scaling, scale [G] and amax_history [G, length].
        n_groups: Number of groups G.
    """

    quantizer: Quantizer
    n_groups: int

    @property
    def scaling_mode(self) -> ScalingMode:
        return self.quantizer.scaling_mode

    @property
    def quantizers(self) -> tuple[Quantizer, ...]:
        """One quantizer per group, with the group's part of the state."""
        state = self.quantizer
        if not isinstance(state, DelayedScaleQuantizer):
            return tuple(dataclasses.replace(state) for _ in range(self.n_groups))
        scale, history = state.scale.reshape(self.n_groups, 1), state.amax_history
        return tuple(
            dataclasses.replace(state, scale=scale[group], amax_history=history[group])
            for group in range(self.n_groups)
        )

    def quantize(
        self,
        x: Array,
        is_rowwise: bool | None = None,
        is_colwise: bool | None = None,
        dq_dtype: Any = None,
        flatten_axis: int = -1,
        group_sizes: Array | None = None,
    ) -> GroupedScaledTensor1x | ScaledTensor2x:
        """Quantize all groups; a delayed-scaling state advances by one step.

        Args:
            x: Rows in groups [M, K], or a stack [G, ..].
            is_rowwise: Return row-wise codes; None for the layout of the quantizer.
            is_colwise: Return column-wise codes; None for the layout of the quantizer.
            dq_dtype: dtype of the dequantized tensor; None for x's dtype.
            flatten_axis: Axis at which x is flattened to a matrix.
            group_sizes: Rows per group [G]; None for a stack.
        """
        check_values("x", x)
        for name, requested in (("is_rowwise", is_rowwise), ("is_colwise", is_colwise)):
            switch(name, requested)
        if group_sizes is not None:
            check_sizes("group_sizes", group_sizes, self.n_groups, x.shape[0])
        tensor, amaxes = self.encode(
            constant(x), group_sizes, is_rowwise, is_colwise, dq_dtype, flatten_axis
        )
        self.quantizer = self.advanced(amaxes).quantizer
        return undifferentiated(tensor, x)

    def encode(
        self,
        x: Array,
        group_sizes: Array | None,
        is_rowwise: bool | None = None,
        is_colwise: bool | None = None,
        dq_dtype: Any = None,
        flatten_axis: int = -1,
        mesh_axes: tuple[str, ...] = (),
        aligned: bool = False,
    ) -> tuple[GroupedScaledTensor1x | ScaledTensor2x, Array | None]:
        """Quantize without a state change; return the tensor, and every group's absolute maximum or None.

        Scales from maxima follow from the maxima over `mesh_axes`. The returned maxima cover this device only;
        `groups_advanced_together` reduces them.

        Args:
            x: Rows in groups [M, K], or a stack [G, ..].
            group_sizes: Rows per group [G]; None for a stack.
            is_rowwise: Return row-wise codes; None for the layout of the quantizer.
            is_colwise: Return column-wise codes; None for the layout of the quantizer.
            dq_dtype: dtype of the dequantized tensor; None for x's dtype.
            flatten_axis: Axis at which x is flattened to a matrix.
            mesh_axes: Manual mesh axes that shard the rows of the groups; maxima are reduced over them.
            aligned: Whether the caller guarantees that each entry in group_sizes is a multiple of the format's block.
        """
        self._check(x, group_sizes, flatten_axis)
        options = (is_rowwise, is_colwise, dq_dtype, flatten_axis)
        if group_sizes is None and x.ndim == 3 and self.scaling_mode.is_tensor_scaling():
            return self._matrices(x, *options[:3])
        if group_sizes is None:
            # A stack [G, ..], each matrix by the quantizer of its group.
            state, axis = self.quantizer, None
            if isinstance(state, DelayedScaleQuantizer):
                state, axis = dataclasses.replace(state, scale=state.scale[:, None]), 0
            each: Any = jax.vmap(
                lambda x, quantizer: quantizer.encode(x, *options), in_axes=(0, axis)
            )
            tensors, amaxes = each(x, state)
            return _stack_quantizers(tensors), amaxes
        if self.scaling_mode.is_tensor_scaling():
            return self._rows(x, group_sizes, *options[:3], mesh_axes)
        dtype = jnp.dtype(x.dtype if dq_dtype is None else check_floating("dq_dtype", dq_dtype))
        directions = self._directions(is_rowwise, is_colwise)
        return encode_rows(
            self.quantizer, x, group_sizes, directions, dtype, mesh_axes, aligned
        ), None

    def advanced(self, amaxes: Array | None) -> GroupedQuantizer:
        """Quantizer for the next step; all groups advance in one operation."""
        (following,) = groups_advanced_together((self,), (amaxes,))
        assert following is not None
        return following

    def _matrices(
        self, x: Array, is_rowwise: bool | None, is_colwise: bool | None, dq_dtype: Any
    ) -> tuple[Any, Array]:
        """Quantize a stack [G, R, C] with one scale per matrix, in one operation."""
        quantizer: Any = self.quantizer
        if isinstance(quantizer, DelayedScaleQuantizer):
            multiplier = quantizer.scale
        else:
            amaxes = exact.bits_to_float(exact.magnitude_bits(x).max(axis=(1, 2), initial=0))
            maximum = find_element(quantizer.q_dtype).maximum
            options = {"power_of_two": quantizer.power_of_two, "epsilon": quantizer.epsilon}
            multiplier = materialize_scales(
                scale_from_amax(materialize_scales(amaxes), maximum, **options)
            )
        directions = self._directions(is_rowwise, is_colwise)
        quantized = quantize_stack(x, multiplier, find_element(self.quantizer.q_dtype), *directions)
        codes = (quantized.codes, quantized.codes_t)
        return self._tensors(
            codes, quantized.scale[:, None], quantized.amax[:, None], None, x, dq_dtype
        ), quantized.amax

    def _rows(
        self,
        x: Array,
        group_sizes: Array,
        is_rowwise: bool | None,
        is_colwise: bool | None,
        dq_dtype: Any,
        mesh_axes: tuple[str, ...],
    ) -> tuple[Any, Array]:
        """Quantize rows with one scale per group: codes = cast(x * the row's group multiplier)."""
        quantizer: Any = self.quantizer
        delayed = isinstance(quantizer, DelayedScaleQuantizer)
        scaling = () if delayed else (quantizer.power_of_two, quantizer.epsilon)
        element = find_element(quantizer.q_dtype)
        multiplier = quantizer.scale if delayed else None
        quantized = quantize_rows(
            x, group_sizes, multiplier, element, *scaling, mesh_axes=mesh_axes
        )
        rowwise, colwise = self._directions(is_rowwise, is_colwise)
        codes = quantized.codes if rowwise else None, quantized.codes.T if colwise else None
        return self._tensors(
            codes, quantized.scale, quantized.amax, group_sizes, x, dq_dtype
        ), quantized.amax

    def _directions(self, is_rowwise: bool | None, is_colwise: bool | None) -> tuple[bool, bool]:
        rowwise, colwise = self.quantizer.directions(is_rowwise, is_colwise)
        if not (rowwise or colwise):
            raise ValueError(
                "is_rowwise=False and is_colwise=False ask for nothing; set at least one of them to True"
            )
        return rowwise, colwise

    def _tensors(
        self,
        codes: tuple[Array | None, Array | None],
        scale: Array,
        amax: Array,
        group_sizes: Array | None,
        x: Array,
        dq_dtype: Any,
    ) -> GroupedScaledTensor1x | ScaledTensor2x:
        """Pack the quantized directions of x, with one scale per group."""
        dtype = x.dtype if dq_dtype is None else check_floating("dq_dtype", dq_dtype)
        codes, scale, amax = name_leaves((codes, scale, amax), self.quantizer.checkpoint_name)
        results = [
            GroupedScaledTensor1x(
                one,
                scale,
                amax,
                group_sizes,
                self.scaling_mode,
                dtype,
                bool(columns),
                "T" if columns else "N",
                1,
            )
            for columns, one in enumerate(codes)
            if one is not None
        ]
        return results[0] if len(results) == 1 else ScaledTensor2x(*results)  # pyright: ignore[reportArgumentType]

    def _check(self, x: Array, group_sizes: Array | None, flatten_axis: int) -> None:
        integer("flatten_axis", flatten_axis)
        groups = x.shape[0] if group_sizes is None else group_sizes.shape[0]
        if groups != self.n_groups:
            raise ValueError(
                f"{groups} groups of x {x.shape}; the quantizer was made for {self.n_groups}"
            )
        if group_sizes is not None and x.ndim != 2:
            raise ValueError(
                f"x has shape {x.shape}; rows in groups are a matrix [M, K], reshape it"
            )
        positive_axis(flatten_axis, x.ndim - (group_sizes is None))
        state = self.quantizer
        if isinstance(state, DelayedScaleQuantizer) and tuple(state.scale.shape) != (
            self.n_groups,
        ):
            raise ValueError(
                f"scale has shape {list(state.scale.shape)}; give one per group, [{self.n_groups}], and a history "
                f"[{self.n_groups}, length], as QuantizerFactory.create(n_groups={self.n_groups}) does"
            )


def check_ungrouped(name: str, quantizers: Any) -> None:
    """Raise TypeError unless this is a single-tensor QuantizerSet, for a product without groups."""
    check_instance(name, quantizers, QuantizerSet)
    for member in ("x", "kernel", "dgrad"):
        quantizer = getattr(quantizers, member)
        if isinstance(quantizer, GroupedQuantizer):
            raise TypeError(
                f"{name}.{member} is a GroupedQuantizer of n_groups={quantizer.n_groups} in a product without groups; "
                "make the set without n_groups, or call grouped_dense"
            )


def groups_advanced_together(
    quantizers: Sequence[GroupedQuantizer | None],
    amaxes: Sequence[Array | None],
    mesh_axes: tuple[str, ...] = (),
) -> tuple[GroupedQuantizer | None, ...]:
    """Quantizers for the next step; states with equal shape and options advance in one operation.

    Args:
        mesh_axes: Manual mesh axes that shard the rows of the groups; the maxima are reduced over them.
    """
    states = [None if quantizer is None else quantizer.quantizer for quantizer in quantizers]
    following = advanced_together(
        states, _reduce_states(states, amaxes, mesh_axes) if mesh_axes else amaxes
    )
    return tuple(
        None if quantizer is None else GroupedQuantizer(state, quantizer.n_groups)  # pyright: ignore[reportArgumentType]
        for quantizer, state in zip(quantizers, following, strict=True)
    )


def _reduce_states(
    states: Sequence[Quantizer | None], amaxes: Sequence[Array | None], mesh_axes: tuple[str, ...]
) -> list[Array | None]:
    """Reduce the maxima that states read over mesh axes, in a single exchange."""
    reduced = {
        index: amax
        for index, (state, amax) in enumerate(zip(states, amaxes, strict=True))
        if isinstance(state, DelayedScaleQuantizer) and amax is not None
    }
    if not reduced:
        return list(amaxes)
    ends = np.cumsum([amax.size for amax in reduced.values()])[:-1]
    maxima = exact.maximum_over_axes(
        jnp.concatenate([amax.reshape(-1) for amax in reduced.values()]), mesh_axes
    )
    largest = dict(zip(reduced, jnp.split(maxima, ends), strict=True))
    return [largest.get(index, amax) for index, amax in enumerate(amaxes)]


def _stack_quantizers(tensor: Any) -> Any:
    """Convert the tensor from `vmap` over quantizers to a grouped tensor."""
    if isinstance(tensor, ScaledTensor2x):
        parts: Any = (tensor.rowwise_tensor, tensor.colwise_tensor)
        return ScaledTensor2x(*(_stack_quantizers(part) for part in parts))
    return GroupedScaledTensor1x(
        tensor.data,
        tensor.scale_inv,
        tensor.amax,
        None,
        tensor.scaling_mode,
        tensor.dq_dtype,
        tensor.is_colwise,
        tensor.data_layout,
        tensor.flatten_axis,
        tensor.has_rht_applied,
    )
