"""y = norm(x) @ kernel + bias, which saves x, the statistics and, for a quantized product, the norm's codes."""

from __future__ import annotations

from jax import Array

from ..common.checks import switch
from .dense import check_contraction, dense, multiply_source
from .functions.products import biased
from .functions.sources import NormSource
from .layernorm import check_norm, layernorm
from .quantize.grouped import check_ungrouped
from .quantize.quantizers import QuantizerSet, noop_quantizer_set
from .runtime.checks import check_axis_names, check_bias, check_values
from .runtime.residual import is_bypassed
from .sharding import with_sharding_constraint_by_logical_axes

__all__ = ["layernorm_dense"]

Axes = tuple[str | None, ...]


def layernorm_dense(
    x: Array,
    kernel: Array,
    gamma: Array,
    beta: Array | None,
    bias: Array | None = None,
    norm_type: str = "layernorm",
    zero_centered_gamma: bool = False,
    epsilon: float = 1e-6,
    transpose_batch_sequence: bool = False,
    layernorm_input_axes: Axes | None = None,
    dot_input_axes: Axes | None = None,
    kernel_axes: Axes | None = None,
    quantizer_set: QuantizerSet = noop_quantizer_set,
) -> Array:
    """Normalize x and multiply it: y [*batch, *features] in the dtype of x.

    Args:
        x: Input [*batch, width].
        kernel: Kernel [width, *features].
        gamma: Factor [width].
        beta: Offset [width], or None.
        bias: Bias [*features], or None.
        norm_type: "layernorm" or "rmsnorm".
        zero_centered_gamma: Multiply by 1 + gamma.
        epsilon: Added to the variance or the mean square.
        transpose_batch_sequence: The sequence axis precedes the batch axis; the result does not depend on it.
        layernorm_input_axes: Logical axis names of x.
        dot_input_axes: Logical axis names of norm(x).
        kernel_axes: Logical axis names of the kernel.
        quantizer_set: Quantizers. Its cotangent is the state of the next step.
    """
    check_ungrouped("quantizer_set", quantizer_set)
    check_values("x", x)
    switch("transpose_batch_sequence", transpose_batch_sequence)
    check_axis_names("layernorm_input_axes", layernorm_input_axes, x.ndim)
    x = with_sharding_constraint_by_logical_axes(x, layernorm_input_axes)
    if not quantizer_set.is_noop:
        name = check_norm(x, gamma, beta, norm_type, zero_centered_gamma, epsilon)
        check_contraction(x, kernel, ((x.ndim - 1,), (0,)))
        check_bias(bias, kernel.shape[1:])
        check_axis_names("dot_input_axes", dot_input_axes, x.ndim)
        check_axis_names("kernel_axes", kernel_axes, kernel.ndim)
        how = (name == "layernorm", zero_centered_gamma, float(epsilon), dot_input_axes)
        norm = NormSource(*how, passes=is_bypassed(x))
        kernel = with_sharding_constraint_by_logical_axes(kernel, kernel_axes)
        return biased(multiply_source(norm, (x, gamma, beta), kernel, quantizer_set, 1), bias)
    normalized = layernorm(x, gamma, beta, norm_type, zero_centered_gamma, epsilon)
    return dense(
        normalized,
        kernel,
        bias,
        contracting_dims=((x.ndim - 1,), (0,)),
        transpose_batch_sequence=transpose_batch_sequence,
        input_axes=dot_input_axes,
        kernel_axes=kernel_axes,
        quantizer_set=quantizer_set,
    )
