"""y [..., h] = product over i of f_i(x [..., i, h]), quantized if a quantizer is given."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import Array

from ..common.checks import described
from .functions.products import quantized_identity
from .primitives.activation import (
    ACTIVATIONS,
    ActivationParams,
    activation_backward,
    activation_forward,
)
from .quantize.quantizers import Quantizer
from .quantize.sharing import align_mesh_axes
from .runtime.checks import check_optional, check_values
from .runtime.explicit_axes import explicit_entries, unique_axes, with_automatic_axes

__all__ = ["ActivationParams", "activation", "is_known"]


def is_known(activation_type: Sequence[Any]) -> bool:
    """Whether the names form a supported activation.

    Args:
        activation_type: Activation names, for example ("gelu",) or ("silu", "linear").
    """
    return tuple(activation_type) in ACTIVATIONS


def activation(
    x: Array,
    activation_type: Sequence[str],
    quantizer: Quantizer | None = None,
    act_params: ActivationParams | Mapping[str, float] | None = None,
) -> Array:
    """Compute the activation y [..., h] in x's dtype.

    Args:
        x: Values [..., n_act, h] for n_act names.
        activation_type: Names such as ("gelu",) or ("silu", "linear"); a pair multiplies the two.
        quantizer: Quantizer through whose codes y passes, or None. It is differentiable: its cotangent is its next
            state.
        act_params: limit, alpha and glu_linear_offset for ("clamped_silu", "clamped_linear").

    Raises:
        TypeError: An argument has another type.
        ValueError: activation_type is unknown, or x has another shape.
    """
    check_values("x", x)
    names = check_activation(activation_type, x.shape)
    check_optional("quantizer", quantizer, Quantizer)
    x, quantizer = align_mesh_axes(x, quantizer)
    params = ActivationParams.of(act_params)
    y: Any = with_automatic_axes(
        lambda x: _activation(x, names, params),
        x,
        out=lambda: unique_axes((*explicit_entries(x)[:-2], explicit_entries(x)[-1])),
    )
    return y if quantizer is None else quantized_identity(y, quantizer)


def check_activation(activation_type: Sequence[str], shape: Sequence[int]) -> tuple[str, ...]:
    """Normalize the names to a tuple; raise ValueError for unknown names, or if shape is not [..., n_act, h]."""
    if isinstance(activation_type, str) or not isinstance(activation_type, Sequence):
        raise TypeError(
            f"activation_type={described(activation_type)}; give a tuple of names, such as ('gelu',)"
        )
    names = tuple(activation_type)
    if names not in ACTIVATIONS:
        choices = ", ".join(str(names) for names in ACTIVATIONS)
        raise ValueError(
            f"activation_type={names} is not a known activation; choose one of {choices}"
        )
    if len(shape) < 2 or shape[-2] != len(names):
        raise ValueError(f"x has shape {tuple(shape)}; {names} takes [..., {len(names)}, h]")
    return names


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _activation(x: Array, names: tuple[str, ...], params: ActivationParams) -> Array:
    return activation_forward(x, names, params)


_activation.defvjp(
    lambda x, names, params: (activation_forward(x, names, params), x),
    lambda names, params, x, dy: (activation_backward(dy, x, names, params),),
)
