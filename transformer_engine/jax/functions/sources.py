"""Sources for a product's first operand: values, a norm, or an activation.

The kernel that computes the values quantizes the operand. A backward pass saves the codes and the inputs of the norm or
activation, not their result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from ..primitives.activation import ActivationParams, activation_backward, activation_forward
from ..primitives.activation_codes import activation_backward_codes, activation_codes
from ..primitives.norm import norm_backward, norm_forward
from ..primitives.norm_codes import norm_codes
from ..quantize.quantizers import Quantizer
from ..sharding import with_sharding_constraint_by_logical_axes
from .products import Tensor, encode

Axes = tuple[str | None, ...] | None


class SourceOperand(NamedTuple):
    """An operand, its absolute maximum if a state needs it, and the residuals for its gradient.

    Attributes:
        tensor: The operand.
        amax: Absolute maximum, if a state needs it.
        saved: Residuals for the gradient.
    """

    tensor: Tensor
    amax: Array | None
    saved: Any


class OperandSource:
    """Computes the operand of a product from its inputs. Hashable, as a static argument in derivative rules."""

    def make(
        self, inputs: tuple[Any, ...], quantizer: Quantizer | None, flatten_axis: int
    ) -> SourceOperand:
        """Compute the operand [*batch, *contracted]; flatten_axis: where the contracted axes begin."""
        raise NotImplementedError

    def passed(self, inputs: tuple[Any, ...]) -> tuple[Array, ...]:
        """Inputs that bypass the product; see `residual`."""
        return ()

    def gradients(self, saved: Any, gradient: Array, passed: tuple[Array, ...]) -> tuple[Any, ...]:
        """Compute the inputs' gradients from the gradients for the operand and the passed inputs."""
        raise NotImplementedError


@dataclass(frozen=True)
class ValuesSource(OperandSource):
    """The operand is x."""

    def make(
        self, inputs: tuple[Any, ...], quantizer: Quantizer | None, flatten_axis: int
    ) -> SourceOperand:
        (x,) = inputs
        return SourceOperand(*encode(quantizer, x, flatten_axis), None)

    def gradients(self, saved: Any, gradient: Array, passed: tuple[Array, ...]) -> tuple[Any, ...]:
        return (gradient,)


@dataclass(frozen=True)
class NormSource(OperandSource):
    """The operand is layernorm(x, gamma, beta) if centered, otherwise rmsnorm(x, gamma).

    Attributes:
        centered: Whether the norm is a layernorm.
        zero_centered: Whether the scale is gamma + 1.
        epsilon: Added to the variance.
        axes: Logical names for the operand's axes.
        passes: Whether x bypasses the product.
    """

    centered: bool
    zero_centered: bool
    epsilon: float
    axes: Axes = None
    passes: bool = False

    def make(
        self, inputs: tuple[Any, ...], quantizer: Quantizer | None, flatten_axis: int
    ) -> SourceOperand:
        x, gamma, beta = inputs
        options = (self.centered, self.zero_centered, self.epsilon)
        cast = None if quantizer is None else quantizer.cast()
        if quantizer is None or cast is None:
            y, mean, rstdev = norm_forward(x, gamma, beta, *options)
            tensor, amax = encode(quantizer, y, flatten_axis)
        else:
            codes, mean, rstdev = norm_codes(x, gamma, beta, cast, *options)
            tensor, amax = quantizer.from_codes(codes, x.shape, x.dtype, flatten_axis)
        return SourceOperand(_sharded(tensor, self.axes), amax, (x, gamma, beta, mean, rstdev))

    def passed(self, inputs: tuple[Any, ...]) -> tuple[Array, ...]:
        return inputs[:1] if self.passes else ()

    def gradients(self, saved: Any, gradient: Array, passed: tuple[Array, ...]) -> tuple[Any, ...]:
        x, gamma, beta, mean, rstdev = saved
        gradient = with_sharding_constraint_by_logical_axes(gradient, self.axes)
        return norm_backward(gradient, x, gamma, beta, mean, rstdev, self.zero_centered, *passed)


@dataclass(frozen=True)
class ActivationSource(OperandSource):
    """The operand multiplies the activations of x [*batch, n, F]; axes: logical names for the operand's axes."""

    names: tuple[str, ...]
    params: ActivationParams
    axes: Axes = None

    def make(
        self, inputs: tuple[Any, ...], quantizer: Quantizer | None, flatten_axis: int
    ) -> SourceOperand:
        (x,) = inputs
        cast = None if quantizer is None else quantizer.cast()
        if quantizer is None or cast is None:
            y = activation_forward(x, self.names, self.params)
            tensor, amax = encode(quantizer, y, flatten_axis)
        else:
            codes = activation_codes(x, cast, self.names, self.params)
            tensor, amax = quantizer.from_codes(
                codes, (*x.shape[:-2], x.shape[-1]), x.dtype, flatten_axis
            )
        return SourceOperand(_sharded(tensor, self.axes), amax, x)

    def gradients(self, saved: Any, gradient: Array, passed: tuple[Array, ...]) -> tuple[Any, ...]:
        gradient = with_sharding_constraint_by_logical_axes(gradient, self.axes)
        return (activation_backward(gradient, saved, self.names, self.params),)

    def encode_gradient(
        self, saved: Array, gradient: Array, quantizer: Quantizer | None, sums: Any | None
    ) -> tuple[Tensor, Array | None, Array | None]:
        """Quantize the gradient of x; also return its absolute maximum.

        With a dtype `sums`, the sums over the batch [n, F] are returned in it, too.
        """
        gradient = with_sharding_constraint_by_logical_axes(gradient, self.axes)
        cast = None if quantizer is None else quantizer.cast()
        if quantizer is None or cast is None:
            dx = activation_backward(gradient, saved, self.names, self.params)
            rows = tuple(range(dx.ndim - 2))
            total = None if sums is None else dx.astype(jnp.float32).sum(axis=rows).astype(sums)
            return *encode(quantizer, dx, -2), total
        codes, total = activation_backward_codes(
            gradient, saved, cast, self.names, self.params, sums
        )
        tensor, amax = quantizer.from_codes(codes, saved.shape, saved.dtype, -2)
        return tensor, amax, total


def _sharded(tensor: Tensor, axes: Axes) -> Tensor:
    """Shard the operand by its logical axis names, so that devices exchange codes instead of values."""
    if not axes:
        return tensor
    return tensor.apply_sharding_constraint_by_logical_axes(axes)  # pyright: ignore[reportAttributeAccessIssue]
