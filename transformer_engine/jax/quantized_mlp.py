"""y = activation(norm(x) @ kernel_1 + bias_1) @ kernel_2, every operand quantized in the kernel that makes it.

One rule of differentiation for the whole: the gradient of the first product is quantized where the activation's
gradient is made, and the states of both products advance in one operation.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from . import products
from .bias import biased
from .primitives.operand import Operand
from .quantize.quantizers import QuantizerSet, advanced_together, as_cotangent
from .residual import taken_along
from .sources import Activation, Made, Source
from .undifferentiated import constant, like, undifferentiated
from .varying import vary_alike


@dataclass(frozen=True)
class Plan:
    """What is in front of the first product, what is between both, and the name of what the first makes."""

    source: Source
    activation: Activation
    name: str


def quantized_mlp(
    plan: Plan,
    given: tuple[Any, ...],
    kernels: Sequence[Array],
    bias: Array | None,
    quantizer_sets: Sequence[QuantizerSet],
) -> Array:
    """y [*batch, h] of given, whose first is x [*batch, h]; kernels [h, n_act, f], [f, h]; bias [n_act, f] or None."""
    values, sets = vary_alike((given, tuple(kernels), bias), tuple(quantizer_sets))
    made: Any = _mlp(plan, *values, sets)
    y, passed = made
    taken_along(passed)
    return y


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(
    plan: Plan, given: Any, kernels: Any, bias: Array | None, sets: Any
) -> tuple[Array, tuple[Array, ...]]:
    return _forward(plan, given, kernels, bias, sets)[0]


def _forward(
    plan: Plan, given: Any, kernels: Any, bias: Array | None, sets: Any
) -> tuple[tuple[Array, tuple[Array, ...]], Any]:
    dtype, batch, of = given[0].dtype, given[0].ndim - 1, (tuple(kernels), bias, given)
    passed = plan.source.passed(given)
    # Arrays without elements carry shapes and dtypes of the gradients.
    likes, bias_like, given_like = jax.tree.map(like, of)
    (kernels, bias, given), sets = constant((of, sets))
    first = plan.source.make(given, sets[0].x, -1)
    hidden, kernel_1 = _product(first, kernels[0], sets[0], dtype, batch)
    hidden = checkpoint_name(biased(hidden, bias), plan.name)
    second = plan.activation.make((hidden,), sets[1].x, -1)
    y, kernel_2 = _product(second, kernels[1], sets[1], dtype, batch)
    columns = products.column_operand(first.tensor, batch), products.column_operand(second.tensor, batch)
    amaxes = (first.amax, kernel_1.amax, second.amax, kernel_2.amax)
    y = undifferentiated(y, of)
    kept = (
        (first.saved, second.saved),
        columns,
        (kernel_1.rows, kernel_2.rows),
        (likes, bias_like, given_like),
        sets,
        amaxes,
    )
    return (y, passed), kept


class _Kernel(NamedTuple):
    """A kernel as the gradient of its product's operand reads it, and its maximum."""

    rows: Operand
    amax: Array | None


def _product(
    made: Made, kernel: Array, quantizers: QuantizerSet, dtype: Any, batch: int
) -> tuple[Array, _Kernel]:
    """made @ kernel [*batch, *features]"""
    codes, amax = products.encode(quantizers.kernel, kernel, 1)
    y = products.forward_product(
        products.row_operand(made.tensor, batch), products.column_operand(codes, 1), dtype
    )
    return y, _Kernel(products.row_operand(codes, 1), amax)


def _backward(plan: Plan, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    (saved, hidden), columns, rows, (likes, bias_like, given_like), sets, amaxes = residuals
    of = (cotangents, likes, bias_like, given_like)
    dy, passed = constant(cotangents)
    batch, dtype = dy.ndim - 1, dy.dtype
    codes_2, amax_2 = products.encode(products.gradient_quantizer(sets[1].dgrad, dy), dy, batch)
    d_activated, d_kernel_2 = products.gradient_products(
        codes_2, batch, rows[1], columns[1], (dtype, likes[1].dtype)
    )
    codes_1, amax_1, d_bias = plan.activation.encoded_gradient(
        hidden,
        d_activated,
        products.gradient_quantizer(sets[0].dgrad, hidden),
        None if bias_like is None else bias_like.dtype,
    )
    dx, d_kernel_1 = products.gradient_products(codes_1, batch, rows[0], columns[0], (dtype, likes[0].dtype))
    made = (plan.source.gradients(saved, dx, passed), (d_kernel_1, d_kernel_2), d_bias)
    made = undifferentiated(made, of)
    states = [state for one in sets for state in (one.x, one.kernel, one.dgrad)]
    following = advanced_together(states, (*amaxes[:2], amax_1, *amaxes[2:], amax_2))
    return (
        *made,
        tuple(as_cotangent(QuantizerSet(*part)) for part in (following[:3], following[3:])),
    )


_mlp.defvjp(_forward, _backward)
