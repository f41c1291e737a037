"""Rotary position embedding with Triton kernels, which compute the cosines and sines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Backend
from ..kernels import Kernel, call
from ..launching import platform_failure, run, run_first
from ..partitioning import ShardingRule
from .reference import RopeRequest


def unsupported_reason(request: RopeRequest) -> str | None:
    """Return why the backend does not support the request, or None."""
    if 0 in request.shape:
        return "an array without elements"
    return platform_failure(request.platform, "RotaryPrimitive")


@dataclass(frozen=True)
class RotationKernel(Kernel):
    """Rotate x [outer, inner, heads, features] by angles [positions, features].

    Attributes:
        interleaved: Whether the features of a pair are adjacent; otherwise they are half the rotated features
            apart.
        sequence_first: Whether the sequence axis precedes the batch axis.
        back: Whether the kernel rotates by the negative angles (backward pass).
    """

    interleaved: bool
    sequence_first: bool
    back: bool

    @property
    def rule(self) -> ShardingRule:
        axes = "s b h d" if self.sequence_first else "b s h d"
        return ShardingRule(f"{axes}, p e -> {axes}", ("s", "d", "p", "e"))

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct(operands[0].shape, operands[0].dtype),)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import rope

        x, angles = arrays
        outer, inner, heads, features = x.shape
        launch = rope.rotate(
            (outer, inner, heads, features),
            (inner * heads * features, heads * features, features),
            (angles.shape[0], angles.shape[1]),
            0,
            x.dtype.name,
            layout="sbhd" if self.sequence_first else "bshd",
            interleaved=self.interleaved,
            transposed=self.back,
            context=(1, 0),
            equal_angles=True,
        )
        return (run_first(launch, [x, angles, None, None]),)


@dataclass(frozen=True)
class PackedRotationKernel(RotationKernel):
    """Rotate queries and keys of packed [outer, inner, 3, heads * width] by angles [positions, width].

    Results: q, k and v [outer, inner, heads, width].

    With back, (dq, dk, dv, angles) -> the gradient of packed.
    """

    heads: int
    width: int

    @property
    def rule(self) -> ShardingRule:
        tokens = "s b" if self.sequence_first else "b s"
        # Shardy rejects an axis that is split into a one-element factor and another factor.
        row = "d" if self.heads == 1 else "(h d)"
        separate = ", ".join([f"{tokens} h d"] * 3)
        joint = f"{tokens} t {row}"
        text = f"{separate}, p e -> {joint}" if self.back else f"{joint}, p e -> {separate}"
        sizes = {"t": 3, "h": self.heads, "d": self.width}
        return ShardingRule(text, ("s", "t", "d", "p", "e"), sizes)

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        x = operands[0]
        if self.back:
            return (jax.ShapeDtypeStruct((*x.shape[:2], 3, x.shape[2] * x.shape[3]), x.dtype),)
        heads = x.shape[3] // self.width
        return (jax.ShapeDtypeStruct((*x.shape[:2], heads, self.width), x.dtype),) * 3

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import rope_packed

        *values, angles = arrays
        x = values[0]
        tokens, layout = (x.shape[0], x.shape[1]), "sbhd" if self.sequence_first else "bshd"
        heads = x.shape[2] if self.back else x.shape[3] // self.width
        row = heads * self.width
        launch = rope_packed.rotate_packed(
            tokens,
            (heads, 1),
            (self.width, self.width),
            (x.shape[1] * 3 * row, 3 * row, self.width),
            (angles.shape[0], angles.shape[1], angles.shape[1]),
            0,
            x.dtype.name,
            layout=layout,
            interleaved=self.interleaved,
            transposed=self.back,
            context=(1, 0),
            separate=True,
            equal_angles=True,
        )
        if self.back:
            (packed,) = run(launch, [angles, angles, None, None, None, *values])
            assert packed is not None
            return (packed.reshape(*tokens, 3, row),)
        q, k, v, *_ = run(launch, [angles, angles, None, None, x])
        assert q is not None and k is not None and v is not None
        return q, k, v


def _angle_of_each_feature(angles: Array, interleaved: bool) -> Array:
    """Expand pair angles [s, d / 2] to [s, d]: the kernels read one angle per feature."""
    return (
        jnp.repeat(angles, 2, axis=1) if interleaved else jnp.concatenate((angles, angles), axis=1)
    )


def rotate(x: Array, angles: Array, interleaved: bool, sequence_first: bool, back: bool) -> Array:
    """See `rope.rotate`."""
    kernel = RotationKernel(interleaved, sequence_first, back)
    return call(kernel, x, _angle_of_each_feature(angles, interleaved))[0]


def rotate_packed(
    *arrays: Array, heads: int, interleaved: bool, sequence_first: bool, back: bool
) -> tuple[Array, ...]:
    """See `reference.run_packed`."""
    *values, angles = arrays
    width = values[0].shape[-1] // (1 if back else heads)
    kernel = PackedRotationKernel(interleaved, sequence_first, back, heads, width)
    return call(kernel, *values, _angle_of_each_feature(angles, interleaved))


BACKEND = Backend[RopeRequest](
    "triton",
    unsupported_reason=unsupported_reason,
    bind=lambda request: rotate_packed if request.packed else rotate,
)
