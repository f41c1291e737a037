"""x [b, s, h, d] with zeros in tokens of no sequence, by a kernel that writes those alone, where x lies."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..kernels import Kernel, call
from ..launching import refuses_kernels, run
from .triton_kernels import head_factors


@dataclass(frozen=True)
class Clear(Kernel):
    """(x [b, s, h, d], seen uint8 [b, s]) -> x, 0 where seen is; cut along batches and groups of heads, as cuDNN is

    groups    heads of keys; members: heads of x that share one
    """

    groups: int
    members: int
    whole = ("s", "d", "r")

    @property
    def rule(self) -> str:
        axes = f"b s {head_factors(self.groups, self.members)} d"
        return f"{axes}, b s -> {axes}"

    @property
    def sizes(self) -> dict[str, int]:
        return {"g": self.groups, "r": self.members}

    @property
    def replicated(self) -> tuple[str, ...]:
        return tuple(name for name in self.whole if name in self.rule)

    def results(self, *operands: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct(operands[0].shape, operands[0].dtype),)

    def run(self, *arrays: Array) -> tuple[Array, ...]:
        from ....common.kernels import packed_sequences  # it imports triton

        x, seen = arrays
        (made,) = run(packed_sequences.zero_unseen(seen.size, prod(x.shape[2:])), [x, seen])
        assert made is not None
        return (made,)


def cleared(x: Array, seen: Array, groups: int) -> Array:
    """x where seen, bool [b, s], and 0 elsewhere; for programs that are lowered for CUDA."""
    if refuses_kernels() is not None:
        return jnp.where(seen[:, :, None, None], x, 0)
    return call(Clear(groups, x.shape[2] // groups), x, seen.astype(jnp.uint8))[0]
