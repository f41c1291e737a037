"""Matrix-product request."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from ....common.formats import TensorFormat
from ....common.hardware import Capability, Hardware
from ...runtime.platform import hardware
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
        hardware: The GPU's row in the hardware table.
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

    @property
    def block_products(self) -> Capability | None:
        """Capability that multiplies these block-scaled operands; None for operands that do not multiply by blocks."""
        a, b = self.a_format, self.b_format
        if a is None or b is None or a.block_products != b.block_products:
            return None
        return a.block_products

    @property
    def swizzled(self) -> bool:
        """Whether matrix instructions read the scales of both operands."""
        return (
            self.block_products is not None and self.a_format is not None and self.a_format.swizzled
        )

    @classmethod
    def of(
        cls, a: Operand, b: Operand, dtype: jnp.dtype, exact: bool, platform: str
    ) -> GemmRequest:
        """Build the request for a product from two operands."""
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
