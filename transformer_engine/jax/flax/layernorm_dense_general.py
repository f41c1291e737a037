"""LayerNormDenseGeneral: y = norm(x) @ kernel + bias."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from ...common.checks import positive, suggests_keywords, whole
from ..dense import dense
from ..functions.products import biased
from ..layernorm_dense import layernorm_dense
from ..quantize.config import get_global_quantize_recipe
from ..quantize.quantizers import QuantizerSet
from .base import (
    Axes,
    Initializer,
    TransformerEngineBase,
    check_call,
    kernel_initializer,
    parameter,
)
from .dense_general import normalize_axes
from .low_rank import _canonicalize_tuple, low_rank_term
from .norm import norm_of_inputs, norm_parameters, scale_initializer


@suggests_keywords
class LayerNormDenseGeneral(TransformerEngineBase):
    """Normalize x and multiply it: (y [*batch, *features], norm(x) or None), in the dtype of x.

    Args:
        enable_layernorm: Apply the norm.
        ln_bias_init: Initializer for ln_bias.
        ln_bias_axes: Logical axis names for ln_bias.
        return_layernorm_output: Return norm(x), otherwise None.
        layernorm_input_axes: Logical axis names of x.
        dot_input_axes: Logical axis names of norm(x).
        depth_scaling: Divide y by this number.

    The other arguments are as in `DenseGeneral` and `LayerNorm`.
    """

    features: Iterable[int] | int
    enable_layernorm: bool = True
    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: Initializer | None = None
    scale_axes: Axes = ("embed",)
    ln_bias_init: Initializer = nn.initializers.zeros
    ln_bias_axes: Axes = ("embed",)
    kernel_init: Initializer | None = None
    kernel_axes: Axes = ()
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    bias_axes: Axes = ()
    return_layernorm_output: bool = False
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    axis: Iterable[int] | int = -1
    dtype: Any = jnp.float32
    layernorm_input_axes: Axes | None = None
    dot_input_axes: Axes | None = None
    depth_scaling: float | None = None
    transpose_batch_sequence: bool = False
    quantization_checkpoint_name: str | None = None

    def __post_init__(self) -> None:
        self.kernel_init = kernel_initializer(self.kernel_init, self.dtype)
        self.scale_init = scale_initializer(self.scale_init, self.zero_centered_gamma)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: Array) -> tuple[Array, Array | None]:
        """Compute y, in which the features replace the contracted axes and come last, and norm(inputs) or None.

        Args:
            inputs: Inputs with the contracted axes `axis`.
        """
        assert self.kernel_init is not None and self.scale_init is not None, (
            "__post_init__ sets them"
        )
        check_call(self, inputs=inputs)
        features = _canonicalize_tuple(self.features)
        for extent in features:
            whole("features", extent)
        if self.depth_scaling is not None:
            positive("depth_scaling", self.depth_scaling)
        axis = normalize_axes(self.axis, inputs.ndim)
        if self._fuses_quantization(axis, inputs.ndim):
            return self._depth_scaled(self._normalized_product(inputs, features)), None
        normalized = norm_of_inputs(self, inputs)
        kernel, quantizer_set = self._kernel(tuple(inputs.shape[d] for d in axis), features)
        y = dense(
            normalized,
            kernel,
            contracting_dims=(axis, tuple(range(len(axis)))),
            transpose_batch_sequence=self.transpose_batch_sequence,
            input_axes=self.dot_input_axes,
            kernel_axes=self.kernel_axes,
            quantizer_set=quantizer_set,
        )
        if self.enable_low_rank_adaptation:
            y = y + low_rank_term(
                self,
                "",
                normalized,
                axis,
                features,
                self.kernel_init,
                self.low_rank_adaptation_dim,
                self.low_rank_adaptation_alpha,
            )
        if self.use_bias:
            y = biased(y, self._bias(features))
        return self._depth_scaled(y), normalized if self.return_layernorm_output else None

    def _fuses_quantization(self, axis: tuple[int, ...], ndim: int) -> bool:
        """Whether only a quantized product reads the norm's result, so that only its codes must exist."""
        alone = self.enable_layernorm and not (
            self.return_layernorm_output or self.enable_low_rank_adaptation
        )
        return alone and axis == (ndim - 1,) and get_global_quantize_recipe() is not None

    def _normalized_product(self, inputs: Array, features: tuple[int, ...]) -> Array:
        scale, ln_bias = norm_parameters(
            self, inputs.shape[-1], self.ln_bias_init, self.ln_bias_axes
        )
        kernel, quantizer_set = self._kernel(inputs.shape[-1:], features)
        bias = self._bias(features) if self.use_bias else None
        return layernorm_dense(
            inputs,
            kernel,
            scale,
            ln_bias,
            bias,
            self.layernorm_type,
            self.zero_centered_gamma,
            self.epsilon,
            self.transpose_batch_sequence,
            self.layernorm_input_axes,
            self.dot_input_axes,
            self.kernel_axes,
            quantizer_set,
        )

    def _kernel(
        self, sizes: tuple[int, ...], features: tuple[int, ...]
    ) -> tuple[Array, QuantizerSet]:
        """Create kernel [*sizes, *features] and the quantizers of its product."""
        assert self.kernel_init is not None, "__post_init__ sets it"
        shape = (*sizes, *features)
        kernel = parameter(self, "kernel", self.kernel_init, self.kernel_axes, shape, self.dtype)
        name = self.quantization_checkpoint_name
        return kernel, self.generate_quantizer_set(quantization_checkpoint_name=name)

    def _bias(self, features: tuple[int, ...]) -> Array:
        return parameter(self, "bias", self.bias_init, self.bias_axes, features, self.dtype)

    def _depth_scaled(self, y: Array) -> Array:
        return y if self.depth_scaling is None else y / self.depth_scaling
