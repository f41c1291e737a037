"""What backends judge of a product."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from ....common.formats import TensorFormat
from ...platform import compute_capability
from ..operand import Operand


@dataclass(frozen=True)
class GemmRequest:
    """The facts: formats, element types, extents, the result's dtype and the platform; never values.

    platform     "cuda" or "cpu": what the program is lowered for, whatever the machine that traces it
    capability   ten times the GPU's compute capability
    exact        partial sums are promoted to float32; False allows the tensor cores' faster accumulation
    """

    a_format: TensorFormat | None
    b_format: TensorFormat | None
    a_element: jnp.dtype
    b_element: jnp.dtype
    m: int
    n: int
    k: int
    dtype: jnp.dtype
    platform: str
    capability: int
    exact: bool

    @classmethod
    def of(cls, a: Operand, b: Operand, dtype: jnp.dtype, exact: bool, platform: str) -> GemmRequest:
        return cls(
            a.format,
            b.format,
            a.codes.dtype,
            b.codes.dtype,
            a.rows,
            b.rows,
            a.depth,
            dtype,
            platform,
            compute_capability(),
            exact,
        )
