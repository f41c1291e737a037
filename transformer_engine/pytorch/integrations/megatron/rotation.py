"""Rotary embeddings in the forms Megatron-core hands them on: angles [s, 1, 1, d], or tables of cosines and sines."""

from __future__ import annotations

import torch
from torch import Tensor

from ...attention.rope import apply_rotary_pos_emb


def rotated(
    x: Tensor,
    freqs: Tensor,
    interleaved: bool,
    mscale: float = 1.0,
    cu_seqlens: Tensor | None = None,
    cp: tuple[int, int] = (1, 0),
) -> Tensor:
    """x [s, b, h, d], or [t, h, d] with cu_seqlens, turned by freqs [s, 1, 1, d]; mscale times what is turned.

    cp   ranks of the context-parallel group, and this one; x holds this rank's part
    """
    turned = apply_rotary_pos_emb(
        x,
        freqs,
        tensor_format="sbhd" if cu_seqlens is None else "thd",
        interleaved=interleaved,
        cu_seqlens=cu_seqlens,
        cp_size=cp[0],
        cp_rank=cp[1],
    )
    return turned if mscale == 1.0 else _scaled(turned, freqs.shape[-1], mscale)


def _scaled(x: Tensor, size: int, mscale: float) -> Tensor:
    """The first `size` features of each head times mscale."""
    head, rest = x[..., :size] * mscale, x[..., size:]
    return torch.cat((head, rest), dim=-1) if rest.shape[-1] else head


def rotated_at(x: Tensor, freqs: Tensor, positions: Tensor, interleaved: bool, mscale: float = 1.0) -> Tensor:
    """x [t, 1, h, d] turned by the angles of its tokens' positions."""
    return rotated(x, freqs[positions], interleaved, mscale)


def rotated_by_tables(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [.., d] turned by cos and sin [.., r / 2], one column a pair of features; features past r stay."""
    size = 2 * cos.shape[-1]
    turned, rest = x[..., :size].float(), x[..., size:]
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    cos, sin = cos.float(), sin.float()
    pair = first * cos - second * sin, second * cos + first * sin
    made = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((made.to(x.dtype), rest), dim=-1)
