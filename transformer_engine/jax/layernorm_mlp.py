"""y = activation(norm(x) @ kernel_1 + bias_1) @ kernel_2 + bias_2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from ..common.checks import described, switch, text_or_none
from .activation import ActivationParams, activation, check_activation
from .collective import CollectiveOpSet, noop_collective_op_set
from .dense import check_contraction, dense
from .functions.products import biased
from .functions.quantized_mlp import MLPSpec, quantized_mlp
from .functions.sources import ActivationSource, NormSource
from .layernorm import check_norm, layernorm
from .quantize.grouped import check_ungrouped
from .quantize.quantizers import QuantizerSet, noop_quantizer_set
from .runtime.checks import check_axis_names, check_bias, check_instance, check_values
from .runtime.residual import is_bypassed
from .sharding import with_sharding_constraint_by_logical_axes

__all__ = ["layernorm_mlp"]

Axes = tuple[str | None, ...]


def layernorm_mlp(
    x: Array,
    gamma: Array,
    beta: Array | None,
    kernels: Sequence[Array],
    biases: Sequence[Array | None],
    norm_type: str,
    zero_centered_gamma: bool = False,
    epsilon: float = 1e-6,
    transpose_batch_sequence: bool = False,
    norm_input_axes: Axes | None = None,
    dot_1_input_axes: Axes | None = None,
    dot_2_input_axes: Axes | None = None,
    kernel_1_axes: Axes | None = None,
    kernel_2_axes: Axes | None = None,
    ffn1_ckpt_name: str = "ffn1",
    ffn2_ckpt_name: str = "ffn2",
    activation_type: Sequence[str] = ("gelu",),
    activation_params: ActivationParams | Mapping[str, float] | None = None,
    collective_op_sets: tuple[CollectiveOpSet, CollectiveOpSet] = (
        noop_collective_op_set,
        noop_collective_op_set,
    ),
    quantizer_sets: tuple[QuantizerSet, QuantizerSet] = (noop_quantizer_set, noop_quantizer_set),
) -> Array:
    """Normalize x and apply a feed-forward block: y [*batch, h] in the dtype of x.

    Args:
        x: Input [*batch, h].
        gamma: Factor [h].
        beta: Offset [h], or None.
        kernels: Kernels [h, n_act, f] and [f, h].
        biases: Biases [n_act, f] and [h], or None for each.
        norm_type: "layernorm" or "rmsnorm".
        zero_centered_gamma: Multiply by 1 + gamma.
        epsilon: Added to the variance or the mean square.
        transpose_batch_sequence: The sequence axis precedes the batch axis; the result does not depend on it.
        norm_input_axes: Logical axis names of x.
        dot_1_input_axes: Logical axis names of norm(x).
        dot_2_input_axes: Logical axis names for the hidden features.
        kernel_1_axes: Logical axis names for the first kernel.
        kernel_2_axes: Logical axis names for the second kernel.
        ffn1_ckpt_name: Name of the first product for recomputation policies.
        ffn2_ckpt_name: Name of the second product.
        activation_type: Names for n_act activations, whose results are multiplied.
        activation_params: Parameters for clamped activations.
        collective_op_sets: Collective operations around both products; the values do not depend on them.
        quantizer_sets: Quantizers of both products. Their cotangents are the states of the next step.
    """
    for name, pair in (
        ("kernels", kernels),
        ("biases", biases),
        ("collective_op_sets", collective_op_sets),
        ("quantizer_sets", quantizer_sets),
    ):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ValueError(f"{name}={described(pair)}; give a tuple of two, one for each product")
    for index in range(2):
        check_instance("collective_op_sets", collective_op_sets[index], CollectiveOpSet)
        check_ungrouped(f"quantizer_sets[{index}]", quantizer_sets[index])
    check_values("x", x)
    switch("transpose_batch_sequence", transpose_batch_sequence)
    for name, label in (("ffn1_ckpt_name", ffn1_ckpt_name), ("ffn2_ckpt_name", ffn2_ckpt_name)):
        text_or_none(name, label)
    check_axis_names("norm_input_axes", norm_input_axes, x.ndim)
    last = x.ndim - 1
    x = with_sharding_constraint_by_logical_axes(x, norm_input_axes)
    if not (quantizer_sets[0].is_noop or quantizer_sets[1].is_noop):
        name = check_norm(x, gamma, beta, norm_type, zero_centered_gamma, epsilon)
        names = _check_products(x, kernels, biases, activation_type)
        axes = ((dot_1_input_axes, kernel_1_axes), (dot_2_input_axes, kernel_2_axes))
        for place, (kernel, (input_axes, kernel_axes)) in enumerate(
            zip(kernels, axes, strict=True), 1
        ):
            check_axis_names(f"dot_{place}_input_axes", input_axes, x.ndim)
            check_axis_names(f"kernel_{place}_axes", kernel_axes, kernel.ndim)
        options = (name == "layernorm", zero_centered_gamma, float(epsilon), dot_1_input_axes)
        norm = NormSource(*options, passes=is_bypassed(x))
        between = ActivationSource(names, ActivationParams.of(activation_params), dot_2_input_axes)
        laid = [
            with_sharding_constraint_by_logical_axes(k, a[1])
            for k, a in zip(kernels, axes, strict=True)
        ]
        y = quantized_mlp(
            MLPSpec(norm, between, ffn1_ckpt_name),
            (x, gamma, beta),
            laid,
            biases[0],
            quantizer_sets,
        )
        return checkpoint_name(biased(y, biases[1]), ffn2_ckpt_name)
    normalized = layernorm(x, gamma, beta, norm_type, zero_centered_gamma, epsilon)
    hidden = dense(
        normalized,
        kernels[0],
        biases[0],
        contracting_dims=((last,), (0,)),
        transpose_batch_sequence=transpose_batch_sequence,
        input_axes=dot_1_input_axes,
        kernel_axes=kernel_1_axes,
        collective_op_set=collective_op_sets[0],
        quantizer_set=quantizer_sets[0],
    )
    hidden = checkpoint_name(hidden, ffn1_ckpt_name)
    activated = activation(hidden, activation_type, act_params=activation_params)
    y = dense(
        activated,
        kernels[1],
        biases[1],
        contracting_dims=((last,), (0,)),
        transpose_batch_sequence=transpose_batch_sequence,
        input_axes=dot_2_input_axes,
        kernel_axes=kernel_2_axes,
        collective_op_set=collective_op_sets[1],
        quantizer_set=quantizer_sets[1],
    )
    return checkpoint_name(y, ffn2_ckpt_name)


def _check_products(
    x: Array,
    kernels: Sequence[Array],
    biases: Sequence[Array | None],
    activation_type: Sequence[str],
) -> tuple[str, ...]:
    """Normalize the activation names; raise an error if the sizes do not match."""
    last = ((x.ndim - 1,), (0,))
    check_contraction(x, kernels[0], last)
    names = check_activation(activation_type, kernels[0].shape)
    activated: Any = jax.ShapeDtypeStruct((*x.shape[:-1], kernels[0].shape[-1]), x.dtype)
    check_contraction(activated, kernels[1], last)
    for kernel, bias in zip(kernels, biases, strict=True):
        check_bias(bias, kernel.shape[1:])
    return names
