"""y = norm(x) @ kernel + bias: the composition of both, which saves x, the statistics and the codes of the norm."""

from __future__ import annotations

from jax import Array

from .dense import dense
from .layernorm import layernorm
from .quantize.quantizers import QuantizerSet, noop_quantizer_set
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
    """y [*batch, *features] in x's dtype, of x [*batch, width] and kernel [width, *features]."""
    x = with_sharding_constraint_by_logical_axes(x, layernorm_input_axes)
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
