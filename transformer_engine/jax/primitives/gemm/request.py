"""Request of a matrix product."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from ....common.formats import TensorFormat
from ....common.hardware import Hardware
from ...platform import hardware
from ..operand import Operand


@dataclass(frozen=True)
class GemmRequest:
    """Properties of a product a @ b.T that determine its backend.

    Attributes:
        a_format: Format of a, None for values.
        b_format: Format of b, None for values.
        a_element: dtype of a's codes or values.
        b_element: dtype of b's codes or values.
        m: Rows of a.
        n: Rows of b.
        k: Contracted elements.
        dtype: dtype of the product.
        platform: Platform of the program, "cpu" or "cuda", whatever the machine that traces it.
        hardware: Row of the GPU in the table of hardware.
        exact: Whether partial sums are promoted to float32; False allows the faster accumulation of the tensor cores.
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
    hardware: Hardware
    exact: bool

    @classmethod
    def of(cls, a: Operand, b: Operand, dtype: jnp.dtype, exact: bool, platform: str) -> GemmRequest:
        """Return the request of a product of two operands."""
        return cls(
            a_format=a.format,
            b_format=b.format,
            a_element=a.codes.dtype,
            b_element=b.codes.dtype,
            m=a.rows,
            n=b.rows,
            k=a.depth,
            dtype=dtype,
            platform=platform,
            hardware=hardware(),
            exact=exact,
        )
