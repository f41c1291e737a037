"""What a rotation is told: how the tensor is laid out, which positions its tokens have."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RopeSpec(NamedTuple):
    """tensor_format sbhd [s, b, h, d], bshd [b, s, h, d] or thd [t, h, d].

    interleaved  features are paired (0, 1), (2, 3), ... instead of (i, i + d/2)
    cp_size, cp_rank  context parallelism: of 2 * cp_size equal chunks of a sequence this rank holds the two
                 numbered cp_rank and 2 * cp_size - 1 - cp_rank
    clamps       a token whose position lies outside the angles is padding, and turns by the nearest of them; else
                 such a token becomes NaN. Tokens behind the last packed sequence are padding always
    """

    tensor_format: str
    interleaved: bool = False
    cp_size: int = 1
    cp_rank: int = 0
    clamps: bool = False


class Positions(NamedTuple):
    """start [b]: position of each sequence's first token (None: 0); cu_seqlens [b + 1]: bounds of thd."""

    start: Tensor | None = None
    cu_seqlens: Tensor | None = None


class RopeRequest(NamedTuple):
    """One call, as a backend sees it before it says yes or no.

    operation     forward, backward; qkv_forward, qkv_backward
    x             shape and strides of what is rotated, or of the joint tensor; of qkv_backward, of dk
    angles        shapes of the angles, of q and of k
    sequences     of a packed tensor
    sizes         how a group's features split, of a joint tensor
    """

    operation: str
    x: tuple[torch.Size, tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device
    spec: RopeSpec
    angles: tuple[torch.Size, ...] = ()
    sequences: int = 0
    sizes: tuple[int, int, int] = (0, 0, 0)
