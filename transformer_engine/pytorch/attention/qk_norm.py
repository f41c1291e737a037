"""q, k <- norm(q), norm(k) over the features of each head, before their product."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...common.checks import check_option
from ..module.arguments import epsilon
from ..module.layernorm import LayerNorm
from ..module.rmsnorm import RMSNorm
from ..runtime.checks import floating
from ..runtime.device import canonical_device

NORMS = ("L2Normalization", "RMSNorm", "LayerNorm")


class L2Normalization(nn.Module):
    """y [.., d] = x / sqrt(sum(x²) + eps), computed in float32 and returned in x's dtype, without parameters."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = epsilon("eps", eps)

    def forward(self, x: Tensor) -> Tensor:
        """Return y for x [.., d]."""
        floating("x", x)
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().sum(dim=-1, keepdim=True) + self.eps)).to(x.dtype)


def query_key_norm(
    norm: str | None,
    size: int,
    eps: float,
    dtype: torch.dtype | None,
    device: torch.device | str | int,
) -> nn.Module | None:
    """Return the norm called `norm` over heads with `size` features; None for None."""
    if norm is None:
        return None
    check_option("qk_norm_type", norm, (None, *NORMS))
    if norm == "L2Normalization":
        return L2Normalization(eps)
    kind = RMSNorm if norm == "RMSNorm" else LayerNorm
    return kind(size, eps=eps, dtype=dtype, device=canonical_device(device))
