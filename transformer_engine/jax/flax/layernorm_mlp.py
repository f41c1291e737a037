"""LayerNormMLP: y = activation(norm(x) @ wi + wi_bias) @ wo + wo_bias."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from ...common.checks import described, suggests_keywords, switch, whole
from ..activation import ActivationParams, activation, is_known
from ..dense import dense
from ..functions.products import biased
from ..layernorm_mlp import layernorm_mlp
from ..quantize.config import get_global_quantize_recipe
from ..quantize.quantizers import QuantizerSet
from ..runtime.checks import check_rate
from .base import (
    Axes,
    Initializer,
    TransformerEngineBase,
    check_call,
    kernel_initializer,
    parameter,
)
from .dense_general import check_shared_axes, normalize_axes
from .low_rank import low_rank_term
from .norm import norm_of_inputs, norm_parameters, scale_initializer


@suggests_keywords
class LayerNormMLP(TransformerEngineBase):
    """Normalize x [*batch, h] and apply a feed-forward block: (y [*batch, h], norm(x) or None), in the dtype of x.

    The variables are scale, ln_bias [h], wi_kernel [h, n_act, f], wo_kernel [f, h], wi_bias [n_act, f], wo_bias [h].

    Args:
        intermediate_dim: Number f of hidden features.
        kernel_init: Initializer for both kernels.
        kernel_axes_1: Logical axis names for wi_kernel.
        kernel_axes_2: Logical axis names for wo_kernel.
        bias_axes_1: Logical axis names for wi_bias.
        bias_axes_2: Logical axis names for wo_bias.
        activations: Names or functions, whose n_act results are multiplied.
        activation_params: Parameters for clamped activations.
        intermediate_dropout_rng_name: Flax's random-stream name.
        intermediate_dropout_rate: Dropout rate for the hidden features.
        intermediate_hidden_dropout_dims: Axes along which the dropout mask is broadcast.
        dot_1_input_axes: Logical axis names for norm(x).
        dot_2_input_axes: Logical axis names for the hidden features.
        ffn1_ckpt_name: Name of the first product for recomputation policies.
        ffn2_ckpt_name: Name of the second product.

    The other arguments are as in `LayerNormDenseGeneral`.
    """

    intermediate_dim: int = 2048
    enable_layernorm: bool = True
    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: Initializer | None = None
    scale_axes: Axes = ("embed",)
    ln_bias_init: Initializer = nn.initializers.zeros
    ln_bias_axes: Axes = ("embed",)
    kernel_init: Initializer | None = None
    kernel_axes_1: Axes = ("embed", "act", "mlp")
    kernel_axes_2: Axes = ("mlp", "embed")
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    bias_axes_1: Axes = ("act", "mlp")
    bias_axes_2: Axes = ("embed",)
    return_layernorm_output: bool = False
    activations: Sequence[str | Callable[[Array], Array]] = ("gelu",)
    activation_params: ActivationParams | Mapping[str, float] | None = None
    intermediate_dropout_rng_name: str = "dropout"
    intermediate_dropout_rate: float = 0.0
    intermediate_hidden_dropout_dims: Sequence[int] = ()
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    axis: Iterable[int] | int = -1
    dtype: Any = jnp.float32
    layernorm_input_axes: Axes | None = None
    dot_1_input_axes: Axes | None = None
    dot_2_input_axes: Axes | None = None
    ffn1_ckpt_name: str = "ffn1"
    ffn2_ckpt_name: str = "ffn2"
    transpose_batch_sequence: bool = False
    quantization_checkpoint_name: str | None = None

    def __post_init__(self) -> None:
        self.kernel_init = kernel_initializer(self.kernel_init, self.dtype)
        self.scale_init = scale_initializer(self.scale_init, self.zero_centered_gamma)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: Array, deterministic: bool = False) -> tuple[Array, Array | None]:
        """Compute the output and the normalized inputs, or None unless return_layernorm_output.

        Args:
            inputs: Inputs [*batch, h].
            deterministic: Whether to disable dropout.
        """
        check_call(self, inputs=inputs)
        switch("deterministic", deterministic)
        whole("intermediate_dim", self.intermediate_dim)
        check_activations("activations", self.activations)
        check_rate("intermediate_dropout_rate", self.intermediate_dropout_rate)
        check_shared_axes(
            "intermediate_hidden_dropout_dims", self.intermediate_hidden_dropout_dims, inputs.ndim
        )
        if normalize_axes(self.axis, inputs.ndim) != (inputs.ndim - 1,):
            raise ValueError(
                f"axis={self.axis} of {inputs.ndim} axes; LayerNormMLP contracts the last, give -1"
            )
        if self._fuses_quantization(deterministic):
            return self._quantized(inputs), None
        normalized = norm_of_inputs(self, inputs)
        kernels, sets = self._kernels(inputs.shape[-1]), self._quantizer_sets()
        hidden = self._product("wi", normalized, kernels[0], sets[0])
        hidden = self._activate(checkpoint_name(hidden, self.ffn1_ckpt_name))
        hidden = nn.Dropout(
            rate=self.intermediate_dropout_rate,
            broadcast_dims=self.intermediate_hidden_dropout_dims,
            rng_collection=self.intermediate_dropout_rng_name,
        )(hidden, deterministic=deterministic)
        y = checkpoint_name(self._product("wo", hidden, kernels[1], sets[1]), self.ffn2_ckpt_name)
        return y, normalized if self.return_layernorm_output else None

    def _fuses_quantization(self, deterministic: bool) -> bool:
        """Whether only quantized products read norm and activation, so that only their codes must exist."""
        alone = self.enable_layernorm and not (
            self.return_layernorm_output or self.enable_low_rank_adaptation
        )
        drops = self.intermediate_dropout_rate > 0 and not deterministic
        quantizes = get_global_quantize_recipe() is not None
        return alone and not drops and quantizes and is_known(self.activations)

    def _quantized(self, inputs: Array) -> Array:
        scale, ln_bias = norm_parameters(
            self, inputs.shape[-1], self.ln_bias_init, self.ln_bias_axes
        )
        kernels, sets = self._kernels(inputs.shape[-1]), self._quantizer_sets()
        biases = [
            self._bias(name, k.shape[1:]) for name, k in zip(("wi", "wo"), kernels, strict=True)
        ]
        names: Any = self.activations
        return layernorm_mlp(
            inputs,
            scale,
            ln_bias,
            kernels,
            biases,
            self.layernorm_type,
            self.zero_centered_gamma,
            self.epsilon,
            self.transpose_batch_sequence,
            self.layernorm_input_axes,
            self.dot_1_input_axes,
            self.dot_2_input_axes,
            self.kernel_axes_1,
            self.kernel_axes_2,
            self.ffn1_ckpt_name,
            self.ffn2_ckpt_name,
            names,
            self.activation_params,
            quantizer_sets=sets,
        )

    def _kernels(self, width: int) -> tuple[Array, Array]:
        """Create wi_kernel [h, n_act, f] and wo_kernel [f, h]."""
        assert self.kernel_init is not None, "__post_init__ sets it"
        shape = (width, len(self.activations), self.intermediate_dim)
        first = parameter(
            self, "wi_kernel", self._init_stacked, self.kernel_axes_1, shape, self.dtype
        )
        shape = (self.intermediate_dim, width)
        return first, parameter(
            self, "wo_kernel", self.kernel_init, self.kernel_axes_2, shape, self.dtype
        )

    def _quantizer_sets(self) -> tuple[QuantizerSet, QuantizerSet]:
        name = self.quantization_checkpoint_name
        first, second = (
            self.generate_quantizer_set(postfix, quantization_checkpoint_name=name)
            for postfix in ("_0", "_1")
        )
        return first, second

    def _init_stacked(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        """Initialize [h, n_act, f] separately for each activation."""
        assert self.kernel_init is not None
        width, parts, features = shape
        kernels = []
        for _ in range(parts):
            key, init_key = jax.random.split(key)
            kernels.append(self.kernel_init(init_key, (width, features), dtype))
        return jnp.stack(kernels, axis=-2)

    def _product(self, name: str, x: Array, kernel: Array, quantizer_set: QuantizerSet) -> Array:
        """Compute x @ kernel plus low-rank adaptation and bias; name is "wi" or "wo"."""
        first = name == "wi"
        kernel_axes = self.kernel_axes_1 if first else self.kernel_axes_2
        features = kernel.shape[1:]
        last = x.ndim - 1
        y = dense(
            x,
            kernel,
            contracting_dims=((last,), (0,)),
            transpose_batch_sequence=self.transpose_batch_sequence,
            input_axes=self.dot_1_input_axes if first else self.dot_2_input_axes,
            kernel_axes=kernel_axes,
            quantizer_set=quantizer_set,
        )
        if self.enable_low_rank_adaptation:
            init = self._init_stacked if first else self.kernel_init
            assert init is not None
            y = y + low_rank_term(
                self,
                f"{name}_",
                x,
                (last,),
                features,
                init,
                self.low_rank_adaptation_dim,
                self.low_rank_adaptation_alpha,
            )
        return biased(y, self._bias(name, features))

    def _bias(self, name: str, features: tuple[int, ...]) -> Array | None:
        if not self.use_bias:
            return None
        axes = self.bias_axes_1 if name == "wi" else self.bias_axes_2
        return parameter(self, f"{name}_bias", self.bias_init, axes, features, self.dtype)

    def _activate(self, x: Array) -> Array:
        """Multiply the activations of x [.., n_act, f]."""
        if is_known(self.activations):
            return activation(x, self.activations, act_params=self.activation_params)  # pyright: ignore
        y = _function(self.activations[0])(x[..., 0, :])
        for index, name in enumerate(self.activations[1:], 1):
            y = y * _function(name)(x[..., index, :])
        return y


def check_activations(name: str, activations: object) -> None:
    """Raise ValueError unless activations are a non-empty sequence."""
    if isinstance(activations, str) or not isinstance(activations, Sequence) or not activations:
        raise ValueError(
            f"{name}={described(activations)}; give a sequence of at least one, such as ('gelu',)"
        )


def _function(name: str | Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Get an elementwise function: the argument itself, "linear", or a flax.linen function by its name."""
    if callable(name):
        return name
    if name == "linear":
        return lambda x: x
    activation: Callable[[Array], Array] | None = (
        getattr(nn, name, None) if isinstance(name, str) else None
    )
    if activation is None or not callable(activation):
        raise ValueError(
            f"activations: {described(name)} is not an activation; give a name of flax.linen, 'linear' or a function"
        )
    return activation
