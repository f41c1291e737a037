"""visible[b, h, i, j]: whether query i sees key j, the mask of a call as booleans; and the slopes of ALiBi.

Caller masks are True where a key is masked out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .call import AttentionCall, AttentionInputs


def visible(call: AttentionCall, inputs: AttentionInputs) -> Tensor | None:
    """Return visible[b | 1, h | 1, i | 1, j] bool; None if every query sees every key."""
    parts = []
    if call.mask.banded:
        parts.append(_band(call, inputs))
    if call.mask.padding:
        parts.append(
            _is_sequence_token(inputs.masked_kv, inputs.lengths_kv, call.seqlen_kv)[
                :, None, None, :
            ]
        )
        parts.append(
            _is_sequence_token(inputs.masked_q, inputs.lengths_q, call.seqlen_q)[:, None, :, None]
        )
    if call.mask.arbitrary:
        assert inputs.masked is not None
        parts.append(~inputs.masked)
    if not parts:
        return None
    combined = parts[0]
    for part in parts[1:]:
        combined = combined & part
    return combined


def diagonal_shift(call: AttentionCall, inputs: AttentionInputs) -> Tensor | int:
    """Return j - i on the diagonal: 0, or the surplus of keys over queries (per sequence: [b, 1, 1, 1])."""
    if not call.mask.bottom_right:
        return 0
    if not call.mask.padding:
        return call.seqlen_kv - call.seqlen_q
    assert inputs.lengths_q is not None and inputs.lengths_kv is not None
    return (inputs.lengths_kv - inputs.lengths_q)[:, None, None, None]


def distance(call: AttentionCall, inputs: AttentionInputs) -> Tensor:
    """Return j - i - shift [b | 1, 1, i, j], the distance of key j from query i's position on the diagonal."""
    device = inputs.q.device
    i = torch.arange(call.seqlen_q, device=device)[:, None]
    j = torch.arange(call.seqlen_kv, device=device)[None, :]
    return (j - i)[None, None] - diagonal_shift(call, inputs)


def _band(call: AttentionCall, inputs: AttentionInputs) -> Tensor:
    left, right = call.mask.window
    lag = distance(call, inputs)
    if left < 0:
        return lag <= right
    if right < 0:
        return lag >= -left
    return (lag >= -left) & (lag <= right)


def _is_sequence_token(masked: Tensor | None, lengths: Tensor | None, size: int) -> Tensor:
    """Return whether token [b, s] belongs to its sequence, by the mask, otherwise by the length."""
    if masked is not None:
        return ~masked.reshape(-1, size)
    assert lengths is not None
    return torch.arange(size, device=lengths.device)[None, :] < lengths[:, None]


def default_slopes(heads: int, device: torch.device) -> Tensor:
    """ALiBi slopes [heads] float32: Press et al., Train Short, Test Long (2022).

    For a power of two h: 2^(-8/h), 2^(-16/h), ...; for other h the slopes for the next lower power
    n, then every second one in the sequence for 2n.
    """
    power = 1 << (heads.bit_length() - 1)
    head = torch.arange(heads, device=device, dtype=torch.float32)
    exponent = torch.where(head < power, 8.0 * (head + 1.0), 4.0 * (2.0 * (head - power) + 1.0))
    return torch.exp2(-exponent / power)
