"""DenseGeneral: y = x @ kernel + bias over any x axes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from ...common.checks import integers, suggests_keywords, whole
from ..dense import dense
from ..functions.products import biased
from .base import Initializer, TransformerEngineBase, check_call, kernel_initializer, parameter
from .low_rank import _canonicalize_tuple, _normalize_axes, low_rank_term


@suggests_keywords
class DenseGeneral(TransformerEngineBase):
    """Compute y [*batch, *features] = x @ kernel [*axis sizes, *features] + bias [*features], in the dtype of x.

    Args:
        features: Sizes for the axes that replace the contracted axes.
        kernel_init: Kernel initializer, by default variance_scaling(1.0, "fan_in", "truncated_normal").
        kernel_axes: Logical axis names for the kernel, for sharding.
        use_bias: Add a bias.
        bias_init: Bias initializer.
        bias_axes: Logical axis names for the bias.
        enable_low_rank_adaptation: Add x @ a @ b * alpha / dim with learned a and b.
        low_rank_adaptation_dim: Adaptation rank.
        low_rank_adaptation_alpha: Factor alpha; None adds x @ a @ b unscaled.
        axis: Axes of x that are contracted.
        dtype: Parameter dtype.
        input_axes: Logical axis names of x.
        transpose_batch_sequence: The sequence axis precedes the batch axis.
        quantization_checkpoint_name: Quantized-tensor name for recomputation policies.
    """

    features: Iterable[int] | int
    kernel_init: Initializer | None = None
    kernel_axes: tuple[str | None, ...] = ()
    use_bias: bool = True
    bias_init: Initializer = nn.initializers.zeros
    bias_axes: tuple[str | None, ...] = ()
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    axis: Iterable[int] | int = -1
    dtype: Any = jnp.float32
    input_axes: tuple[str | None, ...] = ()
    transpose_batch_sequence: bool = False
    quantization_checkpoint_name: str | None = None

    def __post_init__(self) -> None:
        self.kernel_init = kernel_initializer(self.kernel_init, self.dtype)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        """Compute y, in which the features replace the contracted axes and come last.

        Args:
            inputs: Inputs with the contracted axes `axis`.
        """
        check_call(self, inputs=inputs)
        features = _canonicalize_tuple(self.features)
        if not features:
            raise ValueError("features=() leave no axis; give at least one extent")
        for extent in features:
            whole("features", extent)
        axis = normalize_axes(self.axis, inputs.ndim)
        sizes = tuple(inputs.shape[d] for d in axis)
        shape = (*sizes, *features)
        assert self.kernel_init is not None, "__post_init__ sets it"
        kernel = parameter(self, "kernel", self.kernel_init, self.kernel_axes, shape, self.dtype)
        bias = None
        if self.use_bias:
            bias = parameter(self, "bias", self.bias_init, self.bias_axes, features, self.dtype)
        y = dense(
            inputs,
            kernel,
            contracting_dims=(axis, tuple(range(len(axis)))),
            transpose_batch_sequence=self.transpose_batch_sequence,
            input_axes=self.input_axes,
            kernel_axes=self.kernel_axes,
            quantizer_set=self.generate_quantizer_set(
                quantization_checkpoint_name=self.quantization_checkpoint_name
            ),
        )
        if self.enable_low_rank_adaptation:
            y = y + low_rank_term(
                self,
                "",
                inputs,
                axis,
                features,
                self.kernel_init,
                self.low_rank_adaptation_dim,
                self.low_rank_adaptation_alpha,
            )
        return biased(y, bias)


def check_shared_axes(name: str, axes: Any, ndim: int) -> None:
    """Raise TypeError or ValueError unless `axes` are valid for ndim array axes, along which dropout is shared."""
    integers(name, axes)
    invalid = [d for d in axes if not -ndim <= d < ndim]
    if invalid:
        raise ValueError(
            f"{name}={tuple(axes)}: there is no axis {invalid[0]} of {ndim}; give axes between {-ndim} and {ndim - 1}"
        )


def normalize_axes(axis: Iterable[int] | int, ndim: int) -> tuple[int, ...]:
    """Convert axes to non-negative integers; raise TypeError or ValueError for invalid or repeated axes."""
    axes = _canonicalize_tuple(axis)
    integers("axis", axes)
    invalid = [d for d in axes if not -ndim <= d < ndim]
    if invalid or len(axes) > ndim:
        raise ValueError(
            f"axis={axis} of an input of {ndim} axes; give axes between {-ndim} and {ndim - 1}"
        )
    normalized = _normalize_axes(axes, ndim)
    if not axes or len(set(normalized)) < len(axes):
        raise ValueError(
            f"axis={axis} of an input of {ndim} axes; name at least one axis, and each once"
        )
    return normalized
