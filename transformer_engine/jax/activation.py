"""y [..., h] = product over i of f_i(x [..., i, h]), in FP8 where a quantizer is given."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import Array

from ..common.checks import described
from .checks import check_optional, check_values
from .primitives.activation import ACTIVATIONS, ActivationParams, activation_backward, activation_forward
from .quantize.quantizers import Quantizer
from .quantized_identity import quantized_identity
from .varying import vary_alike

__all__ = ["ActivationParams", "activation", "is_known"]


def is_known(activation_type: Sequence[Any]) -> bool:
    """Is this one of the activations that have names?"""
    return tuple(activation_type) in ACTIVATIONS


def activation(
    x: Array,
    activation_type: Sequence[str],
    quantizer: Quantizer | None = None,
    act_params: ActivationParams | Mapping[str, float] | None = None,
) -> Array:
    """y [..., h] in x's dtype of x [..., n_act, h], n_act being the number of names.

    activation_type   ("gelu",), ("silu", "linear"), ..; a pair multiplies the two
    quantizer         y passes through its codes; differentiable: its cotangent is its next state
    act_params        limit, alpha and glu_linear_offset of ("clamped_silu", "clamped_linear")
    """
    check_values("x", x)
    names = check_activation(activation_type, x.shape)
    check_optional("quantizer", quantizer, Quantizer)
    x, quantizer = vary_alike(x, quantizer)
    y: Any = _activation(x, names, ActivationParams.of(act_params))
    return y if quantizer is None else quantized_identity(y, quantizer)


def check_activation(activation_type: Sequence[str], shape: Sequence[int]) -> tuple[str, ...]:
    """The names, which must be an activation's; ValueError for others, or where shape is not [..., n_act, h]."""
    if isinstance(activation_type, str) or not isinstance(activation_type, Sequence):
        raise TypeError(
            f"activation_type={described(activation_type)}; give a tuple of names, such as ('gelu',)"
        )
    names = tuple(activation_type)
    if names not in ACTIVATIONS:
        choices = ", ".join(str(names) for names in ACTIVATIONS)
        raise ValueError(f"activation_type={names} is none of the activations; choose one of {choices}")
    if len(shape) < 2 or shape[-2] != len(names):
        raise ValueError(f"x has shape {tuple(shape)}; {names} takes [..., {len(names)}, h]")
    return names


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _activation(x: Array, names: tuple[str, ...], params: ActivationParams) -> Array:
    return activation_forward(x, names, params)


def _activation_fwd(x: Array, names: tuple[str, ...], params: ActivationParams) -> tuple[Array, Array]:
    return activation_forward(x, names, params), x


def _activation_bwd(names: tuple[str, ...], params: ActivationParams, x: Array, dy: Array) -> tuple[Array]:
    return (activation_backward(dy, x, names, params),)


_activation.defvjp(_activation_fwd, _activation_bwd)
