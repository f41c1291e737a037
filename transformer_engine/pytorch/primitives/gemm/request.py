"""What a product is asked for: the epilogue, and the request that backends judge."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ....common.formats import TensorFormat
from ...device import get_device_compute_capability
from ..operand import Operand


@dataclass(frozen=True)
class Epilogue:
    """What happens to a @ b.T [M, N] before it is a result.

    dtype       of the result when `out` is None
    bias        [N], added in float32
    out         [M, N], receives the result; accumulate=True adds to what it holds
    exact       partial sums are promoted to float32 (the original's "split accumulator"); False allows the
                faster accumulation of Hopper's FP8 tensor cores, which keeps about 14 bits
    """

    dtype: torch.dtype
    bias: Tensor | None = None
    out: Tensor | None = None
    accumulate: bool = False
    exact: bool = True

    def finish(self, product: Tensor) -> Tensor:
        """Bias, accumulation and cast of a product that no library call has fused."""
        if self.bias is not None:
            # An FP8 product takes its bias in bfloat16 when the result is float32, as cuBLASLt does.
            product = product.float() + self.bias.float()
        return self.store(product)

    def store(self, product: Tensor) -> Tensor:
        """Accumulate into `out`, or cast."""
        if self.out is None:
            return product.to(self.dtype)
        if self.accumulate:
            return self.out.add_(product)
        return self.out.copy_(product)


@dataclass(frozen=True)
class GemmRequest:
    """The facts a backend may judge: formats, element types, extents and the device; never values."""

    a_format: TensorFormat | None
    b_format: TensorFormat | None
    a_element: torch.dtype
    b_element: torch.dtype
    m: int
    n: int
    k: int
    dtype: torch.dtype
    device: str
    capability: tuple[int, int]

    @classmethod
    def of(cls, a: Operand, b: Operand, epilogue: Epilogue) -> GemmRequest:
        device = a.codes.device.type
        return cls(
            a.format,
            b.format,
            a.codes.dtype,
            b.codes.dtype,
            a.rows,
            b.rows,
            a.depth,
            epilogue.dtype if epilogue.out is None else epilogue.out.dtype,
            device,
            get_device_compute_capability() if device == "cuda" else (0, 0),
        )
