"""What the first operand of a product is: values as they lie in memory, a norm of them, or an activation of them.

A quantized operand is made in the kernel that makes its values. What a backward pass keeps is the codes and what the
norm or the activation began with; their result is not kept beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array

from .primitives.activation import ActivationParams, activation_backward, activation_forward
from .primitives.activation_codes import activation_backward_codes, activation_codes
from .primitives.norm import norm_backward, norm_forward
from .primitives.norm_codes import norm_codes
from .products import Tensor, encode
from .quantize.quantizers import Quantizer
from .sharding import with_sharding_constraint_by_logical_axes

Axes = tuple[str | None, ...] | None


class Made(NamedTuple):
    """An operand, its absolute maximum where a state asks for it, and what its gradient needs."""

    tensor: Tensor
    amax: Array | None
    saved: Any


class Source(Protocol):
    """Hashable: a static argument of the rules of differentiation."""

    def make(self, given: tuple[Any, ...], quantizer: Quantizer | None, flatten_axis: int) -> Made:
        """The operand [*batch, *contracted], made of given; flatten_axis: where the contracted axes begin."""
        ...

    def passed(self, given: tuple[Any, ...]) -> tuple[Array, ...]:
        """What is given and goes round the product, see `residual`."""
        ...

    def gradients(self, saved: Any, gradient: Array, passed: tuple[Array, ...]) -> tuple[Any, ...]:
        """Of what was given, by the gradients of the operand and of what was passed."""
        ...


@dataclass(frozen=True)
class Values:
    """x itself."""

    def make(self, given: tuple[Any, ...], quantizer: Quantizer | None, flatten_axis: int) -> Made:
        (x,) = given
        return Made(*encode(quantizer, x, flatten_axis), None)

    def passed(self, given: tuple[Any, ...]) -> tuple[Array, ...]:
        return ()

    def gradients(self, saved: Any, gradient: Array, passed: tuple[Array, ...]) -> tuple[Any, ...]:
        return (gradient,)


@dataclass(frozen=True)
class Norm:
    """layernorm(x, gamma, beta) if centered, else rmsnorm(x, gamma).

    axes     names of those of its result
    passes   x goes round the product
    """

    centered: bool
    zero_centered: bool
    epsilon: float
    axes: Axes = None
    passes: bool = False

    def make(self, given: tuple[Any, ...], quantizer: Quantizer | None, flatten_axis: int) -> Made:
        x, gamma, beta = given
        how = (self.centered, self.zero_centered, self.epsilon)
        cast = None if quantizer is None else quantizer.cast()
        if quantizer is None or cast is None:
            y, mean, rstdev = norm_forward(x, gamma, beta, *how)
            tensor, amax = encode(quantizer, y, flatten_axis)
        else:
            codes, mean, rstdev = norm_codes(x, gamma, beta, cast, *how)
            tensor, amax = quantizer.taken(codes, x.shape, x.dtype, flatten_axis)
        return Made(_laid(tensor, self.axes), amax, (x, gamma, beta, mean, rstdev))

    def passed(self, given: tuple[Any, ...]) -> tuple[Array, ...]:
        return given[:1] if self.passes else ()

    def gradients(self, saved: Any, gradient: Array, passed: tuple[Array, ...]) -> tuple[Any, ...]:
        x, gamma, beta, mean, rstdev = saved
        gradient = with_sharding_constraint_by_logical_axes(gradient, self.axes)
        return norm_backward(gradient, x, gamma, beta, mean, rstdev, self.zero_centered, *passed)


@dataclass(frozen=True)
class Activation:
    """The product of activations by name of x [*batch, n, F]; axes: names of those of its result."""

    names: tuple[str, ...]
    params: ActivationParams
    axes: Axes = None

    def make(self, given: tuple[Any, ...], quantizer: Quantizer | None, flatten_axis: int) -> Made:
        (x,) = given
        cast = None if quantizer is None else quantizer.cast()
        if quantizer is None or cast is None:
            y = activation_forward(x, self.names, self.params)
            tensor, amax = encode(quantizer, y, flatten_axis)
        else:
            codes = activation_codes(x, cast, self.names, self.params)
            tensor, amax = quantizer.taken(codes, (*x.shape[:-2], x.shape[-1]), x.dtype, flatten_axis)
        return Made(_laid(tensor, self.axes), amax, x)

    def passed(self, given: tuple[Any, ...]) -> tuple[Array, ...]:
        return ()

    def gradients(self, saved: Any, gradient: Array, passed: tuple[Array, ...]) -> tuple[Any, ...]:
        gradient = with_sharding_constraint_by_logical_axes(gradient, self.axes)
        return (activation_backward(gradient, saved, self.names, self.params),)

    def encoded_gradient(
        self, saved: Array, gradient: Array, quantizer: Quantizer | None, sums: Any | None
    ) -> tuple[Tensor, Array | None, Array | None]:
        """The gradient of x in both directions, its maximum, and sums over the batch [n, F] as dtype `sums`, if any."""
        gradient = with_sharding_constraint_by_logical_axes(gradient, self.axes)
        cast = None if quantizer is None else quantizer.cast()
        if quantizer is None or cast is None:
            dx = activation_backward(gradient, saved, self.names, self.params)
            rows = tuple(range(dx.ndim - 2))
            total = None if sums is None else dx.astype(jnp.float32).sum(axis=rows).astype(sums)
            return *encode(quantizer, dx, -2), total
        codes, total = activation_backward_codes(gradient, saved, cast, self.names, self.params, sums)
        tensor, amax = quantizer.taken(codes, saved.shape, saved.dtype, -2)
        return tensor, amax, total


def _laid(tensor: Tensor, axes: Axes) -> Tensor:
    """The operand laid over the mesh as the names of its axes say: codes are exchanged, not values."""
    if not axes:
        return tensor
    return tensor.apply_sharding_constraint_by_logical_axes(axes)  # pyright: ignore[reportAttributeAccessIssue]
