"""Queries, keys and values of one interleaved buffer apart, and together again."""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_engine.pytorch.runtime.checks import same_shape, tensor

from .checks import with_axes


def fa_prepare_fwd(qkvi: Tensor) -> Tensor:
    """[3, b, s, h, d]: queries, keys and values apart, from one buffer [s, b, h, 3 d] that interleaves them.

    qkvi is that buffer, or its queries [s, b, h, d] as a view of it.
    """
    tensor("qkvi", qkvi)
    if qkvi.dim() != 4:
        raise ValueError(f"qkvi is {list(qkvi.shape)}; give [s, b, h, 3 d], or its queries as a view of it")
    size = qkvi.shape[-1]
    if qkvi.stride(2) == 3 * size:
        qkvi = qkvi.as_strided((*qkvi.shape[:3], 3 * size), qkvi.stride())
    elif size % 3:
        raise ValueError(
            f"qkvi {list(qkvi.shape)} neither ends in 3 * d features nor is a view of one that does; give either"
        )
    return qkvi.unflatten(-1, (3, -1)).permute(3, 1, 0, 2, 4).contiguous()


def fa_prepare_bwd(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[s, b, h, 3 d]: the inverse of fa_prepare_fwd, for gradients q, k, v [b, s, h, d]."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        with_axes(name, x, 3)
    for name, x in (("k", k), ("v", v)):
        same_shape(name, x, "q", q)
    return torch.stack((q, k, v), dim=-2).flatten(-2).transpose(0, 1).contiguous()
