"""Norm: which normalization a fused layer starts with, as two plain functions with one signature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

from torch import Tensor

from ..primitives.norm import (
    layernorm_backward,
    layernorm_forward,
    reference,
    rmsnorm_backward,
    rmsnorm_forward,
)
from ..primitives.quantize import Cast, Quantized

NORMALIZATIONS = ("LayerNorm", "RMSNorm")


@dataclass(frozen=True)
class Norm:
    """y = (x - mean) * rstdev * gamma + beta (LayerNorm) or x * rstdev * gamma (RMSNorm), row by row."""

    kind: str = "LayerNorm"
    eps: float = 1e-5
    zero_centered: bool = False

    @overload
    def forward(
        self, x: Tensor, gamma: Tensor, beta: Tensor | None, cast: None = None
    ) -> tuple[Tensor, Tensor | None, Tensor]: ...

    @overload
    def forward(
        self, x: Tensor, gamma: Tensor, beta: Tensor | None, cast: Cast
    ) -> tuple[Quantized, Tensor | None, Tensor]: ...

    def forward(
        self, x: Tensor, gamma: Tensor, beta: Tensor | None, cast: Cast | None = None
    ) -> tuple[Tensor | Quantized, Tensor | None, Tensor]:
        """Compute (y, or with a cast its codes, bit-equal to quantizing y; mean and rstdev, float32 [M]).

        The mean of an RMSNorm is None.
        """
        if self.kind == "LayerNorm":
            return layernorm_forward(x, gamma, beta, self.eps, self.zero_centered, cast)
        y, rstdev = rmsnorm_forward(x, gamma, self.eps, self.zero_centered, cast)
        return y, None, rstdev

    def by_torch(self, x: Tensor, gamma: Tensor) -> Tensor:
        """Return y without beta, in torch operations that autograd differentiates any number of times."""
        if self.kind == "LayerNorm":
            return reference.layernorm_forward(x, gamma, None, self.eps, self.zero_centered)[0]
        return reference.rmsnorm_forward(x, gamma, self.eps, self.zero_centered)[0]

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        mean: Tensor | None,
        rstdev: Tensor,
        gamma: Tensor,
        add: Tensor | None = None,
        rounds_first: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute (dx + add, dgamma, dbeta), in one kernel on a GPU.

        Args:
            dy: Output gradient [M, K].
            x: Input [M, K].
            mean, rstdev: Statistics from `forward`.
            gamma: Scale [K].
            add: Gradient [M, K] that is added to dx, such as a residual's; None for none.
            rounds_first: RMSNorm: round dx to x's dtype before `add` is added, as autograd's sum would;
                otherwise only the sum is rounded. A LayerNorm always rounds dx first.
        """
        if mean is not None:
            rest = mean, rstdev, gamma, self.zero_centered
            if add is None or add.dtype == x.dtype:
                return layernorm_backward(dy, x, *rest, add)
            dx, dgamma, dbeta = layernorm_backward(dy, x, *rest)
            return dx + add, dgamma, dbeta
        dx, dgamma = rmsnorm_backward(dy, x, rstdev, gamma, self.zero_centered, add, rounds_first)
        return dx, dgamma, None
