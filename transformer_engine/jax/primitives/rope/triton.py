"""The rotation by the kernel of common/kernels/rope.py, which makes cosines and sines on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ....common.dispatch import Backend
from ..kernels import Kernel, call
from ..launching import refuses_on, run
from .request import RopeRequest


def refuses(request: RopeRequest) -> str | None:
    if 0 in request.shape:
        return "an array without elements"
    name = "RotaryPrimitive"
    return refuses_on(request.platform, name)


@dataclass(frozen=True)
class Rotation(Kernel):
    """(x [outer, inner, heads, features], angles [positions, features]) -> y"""

    interleaved: bool
    sequence_first: bool
    back: bool
    whole = ("s", "d", "p", "e")

    @property
    def rule(self) -> str:
        axes = "s b h d" if self.sequence_first else "b s h d"
        return f"{axes}, p e -> {axes}"

    def results(self, x: Any, angles: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct(x.shape, x.dtype),)

    def run(self, x: Array, angles: Array) -> tuple[Array, ...]:
        from ....common.kernels import rope  # it imports triton

        outer, inner, heads, features = x.shape
        launch = rope.rotate(
            (outer, inner, heads, features), (inner * heads * features, heads * features, features),
            (angles.shape[0], angles.shape[1]), 0, x.dtype.name, layout="sbhd" if self.sequence_first else "bshd",
            interleaved=self.interleaved, transposed=self.back, context=(1, 0),
        )  # fmt: skip
        return (run(launch, [x, angles, None, None])[0],)  # pyright: ignore[reportReturnType]


def rotate(x: Array, angles: Array, interleaved: bool, sequence_first: bool, back: bool) -> Array:
    """See `rope.rotate`."""
    # The kernel reads an angle for each element of a pair.
    both = jnp.repeat(angles, 2, axis=1) if interleaved else jnp.concatenate((angles, angles), axis=1)
    return call(Rotation(interleaved, sequence_first, back), x, both)[0]


BACKEND = Backend[RopeRequest]("triton", refuses=refuses, bind=lambda request: rotate)
