"""y = activation(norm(x) @ kernel_1 + bias_1) @ kernel_2, with each operand quantized by the kernel that computes it.

One derivative rule covers the whole MLP: the activation-gradient kernel quantizes the output gradient of the first
product, and the states of both products advance in one operation.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from ..primitives.operand import Operand
from ..quantize.quantizers import QuantizerSet, advanced_together, as_cotangent
from ..quantize.sharing import align_mesh_axes
from ..runtime.code_bits import bits_to_codes, codes_to_bits
from ..runtime.explicit_axes import explicit_entries, unique_axes, with_automatic_axes
from ..runtime.residual import store_returned_input
from ..runtime.undifferentiated import constant, like, undifferentiated
from .products import (
    biased,
    column_operand,
    encode,
    forward_product,
    gradient_products,
    gradient_quantizer,
    row_operand,
)
from .sources import ActivationSource, OperandSource, SourceOperand


@dataclass(frozen=True)
class MLPSpec:
    """Operands for an MLP's products.

    Attributes:
        source: Source for the first product's operand.
        activation: Source for the second product's operand.
        name: The first product's result name for recomputation policies.
    """

    source: OperandSource
    activation: ActivationSource
    name: str


def quantized_mlp(
    spec: MLPSpec,
    inputs: tuple[Any, ...],
    kernels: Sequence[Array],
    bias: Array | None,
    quantizer_sets: Sequence[QuantizerSet],
) -> Array:
    """Compute y [*batch, h] from inputs, first x [*batch, h]; kernels [h, n, f] and [f, h]; bias [n, f] or None."""
    values, sets = align_mesh_axes((inputs, tuple(kernels), bias), tuple(quantizer_sets))
    x, last = values[0][0], values[1][1]
    y, passed = with_automatic_axes(
        functools.partial(_mlp, spec),
        *values,
        sets,
        out=lambda: (
            unique_axes((*explicit_entries(x)[:-1], *explicit_entries(last)[1:])),
            tuple(unique_axes(explicit_entries(value)) for value in spec.source.passed(values[0])),
        ),
    )
    store_returned_input(passed)
    return y


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(
    spec: MLPSpec, inputs: Any, kernels: Any, bias: Array | None, sets: Any
) -> tuple[Array, tuple[Array, ...]]:
    return _forward(spec, inputs, kernels, bias, sets)[0]


def _forward(
    spec: MLPSpec, inputs: Any, kernels: Any, bias: Array | None, sets: Any
) -> tuple[tuple[Array, tuple[Array, ...]], Any]:
    dtype, batch, of = inputs[0].dtype, inputs[0].ndim - 1, (tuple(kernels), bias, inputs)
    passed = spec.source.passed(inputs)
    # Arrays without elements contain the shapes and dtypes of the gradients.
    likes, bias_like, given_like = jax.tree.map(like, of)
    (kernels, bias, inputs), sets = constant((of, sets))
    first = spec.source.make(inputs, sets[0].x, -1)
    hidden, rows_1, amax_1 = _product(first, kernels[0], sets[0], dtype, batch)
    hidden = checkpoint_name(biased(hidden, bias), spec.name)
    second = spec.activation.make((hidden,), sets[1].x, -1)
    y, rows_2, amax_2 = _product(second, kernels[1], sets[1], dtype, batch)
    columns = column_operand(first.tensor, batch), column_operand(second.tensor, batch)
    saved = (
        (first.saved, second.saved),
        codes_to_bits((columns, (rows_1, rows_2))),
        (likes, bias_like, given_like),
        sets,
        (first.amax, amax_1, second.amax, amax_2),
    )
    return (undifferentiated(y, of), passed), saved


def _product(
    operand: SourceOperand, kernel: Array, quantizers: QuantizerSet, dtype: Any, batch: int
) -> tuple[Array, Operand, Array | None]:
    """Compute operand @ kernel [*batch, *features].

    Also return the kernel's operand for the backward pass, and the kernel's absolute maximum.
    """
    codes, amax = encode(quantizers.kernel, kernel, 1)
    y = forward_product(row_operand(operand.tensor, batch), column_operand(codes, 1), dtype)
    return y, row_operand(codes, 1), amax


def _backward(spec: MLPSpec, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    """Backward pass of the MLP: gradients of inputs, kernels and biases, and the next quantizer states."""
    (saved, hidden), codes, (likes, bias_like, given_like), sets, amaxes = residuals
    columns, rows = bits_to_codes(codes)
    of = (cotangents, likes, bias_like, given_like)
    dy, passed = constant(cotangents)
    batch, dtype = dy.ndim - 1, dy.dtype
    quantizer, transposes_late = gradient_quantizer(sets[1].dgrad, dy)
    codes_2, amax_2 = encode(quantizer, dy, batch)
    d_activated, d_kernel_2 = gradient_products(
        codes_2, transposes_late, batch, rows[1], columns[1], (dtype, likes[1].dtype)
    )
    quantizer, transposes_late = gradient_quantizer(sets[0].dgrad, hidden)
    bias_dtype = None if bias_like is None else bias_like.dtype
    codes_1, amax_1, d_bias = spec.activation.encode_gradient(
        hidden, d_activated, quantizer, bias_dtype
    )
    dx, d_kernel_1 = gradient_products(
        codes_1, transposes_late, batch, rows[0], columns[0], (dtype, likes[0].dtype)
    )
    gradients = (spec.source.gradients(saved, dx, passed), (d_kernel_1, d_kernel_2), d_bias)
    gradients = undifferentiated(gradients, of)
    states = [
        state
        for quantizers in sets
        for state in (quantizers.x, quantizers.kernel, quantizers.dgrad)
    ]
    following = advanced_together(states, (*amaxes[:2], amax_1, *amaxes[2:], amax_2))
    return (
        *gradients,
        tuple(as_cotangent(QuantizerSet(*part)) for part in (following[:3], following[3:])),
    )


_mlp.defvjp(_forward, _backward)
