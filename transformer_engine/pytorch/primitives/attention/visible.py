"""visible[b, h, i, j] = may query i look at key j: the mask of a request as booleans.

Mask tensors that come from outside say True for "masked out".
"""

from __future__ import annotations

import torch
from torch import Tensor

from .request import AttentionInputs, AttentionRequest


def visible(request: AttentionRequest, inputs: AttentionInputs) -> Tensor | None:
    """visible[b | 1, h | 1, i | 1, j] bool; None when every query sees every key."""
    parts = []
    if request.options.mask.banded:
        parts.append(_band(request, inputs))
    if request.options.mask.padding:
        parts.append(_real(inputs.masked_kv, inputs.lengths_kv, request.shape.seqlen_kv)[:, None, None, :])
        parts.append(_real(inputs.masked_q, inputs.lengths_q, request.shape.seqlen_q)[:, None, :, None])
    if request.options.mask.arbitrary:
        assert inputs.masked is not None
        parts.append(~inputs.masked)
    if not parts:
        return None
    together = parts[0]
    for part in parts[1:]:
        together = together & part
    return together


def diagonal_shift(request: AttentionRequest, inputs: AttentionInputs) -> Tensor | int:
    """What j - i is on the diagonal: 0, or the surplus of keys over queries (by sequence: [b, 1, 1, 1])."""
    if not request.options.mask.bottom_right:
        return 0
    if not request.options.mask.padding:
        return request.shape.seqlen_kv - request.shape.seqlen_q
    assert inputs.lengths_q is not None and inputs.lengths_kv is not None
    return (inputs.lengths_kv - inputs.lengths_q)[:, None, None, None]


def distance(request: AttentionRequest, inputs: AttentionInputs) -> Tensor:
    """j - i - shift [b | 1, 1, i, j]: how far key j lies behind query i's place on the diagonal."""
    device = inputs.q.device
    i = torch.arange(request.shape.seqlen_q, device=device)[:, None]
    j = torch.arange(request.shape.seqlen_kv, device=device)[None, :]
    return (j - i)[None, None] - diagonal_shift(request, inputs)


def _band(request: AttentionRequest, inputs: AttentionInputs) -> Tensor:
    left, right = request.options.mask.window
    behind = distance(request, inputs)
    if left < 0:
        return behind <= right
    if right < 0:
        return behind >= -left
    return (behind >= -left) & (behind <= right)


def _real(masked: Tensor | None, lengths: Tensor | None, size: int) -> Tensor:
    """Is token [b, s] a real one: what the mask says, else whether it lies inside its sequence's length."""
    if masked is not None:
        return ~masked.reshape(-1, size)
    assert lengths is not None
    return torch.arange(size, device=lengths.device)[None, :] < lengths[:, None]
