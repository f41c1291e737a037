"""Strides and other numbers that the Triton kernels receive in addition to pointers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .....common.kernels.attention_problem import AttentionProblem
from ....runtime.launching import DTYPE_NAMES
from ..call import AttentionCall, AttentionInputs

Triple = tuple[int, int, int]


class Strides(NamedTuple):
    """torch's strides; () for a missing tensor."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    masked: tuple[int, ...]
    bias: tuple[int, ...]
    slopes: tuple[int, ...]
    pages: tuple[int, ...]


def strides(call: AttentionCall, inputs: AttentionInputs) -> Strides:
    """Strides of a call's tensors."""
    masked, bias, slopes, pages = inputs.masked, inputs.bias, inputs.slopes, inputs.page_table
    return Strides(
        inputs.q.stride(),
        inputs.k.stride(),
        inputs.v.stride(),
        () if masked is None else masked.stride(),
        () if bias is None else bias.stride(),
        () if slopes is None else slopes.stride(),
        () if pages is None else pages.stride(),
    )


def as_bytes(mask: Tensor | None, flat: bool) -> Tensor | None:
    """Return a bool mask as uint8 without a copy; flat: a padding mask [b, 1, 1, s], made contiguous."""
    if mask is None:
        return None
    booleans: Tensor = mask if mask.dtype == torch.bool else mask != 0
    return (booleans.contiguous() if flat else booleans).view(torch.uint8)


def triple(tensor_format: str, strides: tuple[int, ...]) -> Triple:
    """(batch, token, head) strides of a tensor [.., h, d]."""
    if tensor_format == "thd":
        return 0, strides[0], strides[1]
    batch, token = (strides[1], strides[0]) if tensor_format == "sbhd" else (strides[0], strides[1])
    return batch, token, strides[2]


def contiguous_triple(tensor_format: str, batch: int, size: int, heads: int, width: int) -> Triple:
    """(batch, token, head) strides of a contiguous tensor [.., heads, width]."""
    if tensor_format == "sbhd":
        return heads * width, batch * heads * width, width
    return (0 if tensor_format == "thd" else size * heads * width), heads * width, width


def lse_triple(call: AttentionCall, strides: tuple[int, ...] | None) -> Triple:
    """(batch, token, head) strides of lse [b, h, s_q], or [h, t]; None: as the forward pass allocates it."""
    if call.packed:
        head, token = (1, call.heads) if strides is None else strides
        return 0, token, head
    if strides is None:
        strides = (call.heads * call.seqlen_q, call.seqlen_q, 1)
    return strides[0], strides[2], strides[1]


def problem(
    call: AttentionCall, strides: Strides, out: Triple, lse: Triple, shared_memory: int
) -> AttentionProblem:
    """Return a call as the kernels' numbers; out: the output's strides, in the backward pass its gradient's strides."""
    left, right = call.mask.window
    varied = (
        call.bias != "no_bias" or call.mask.arbitrary or call.padding_tensors or call.dropout > 0.0
    )
    return AttentionProblem(
        dtype=DTYPE_NAMES[call.dtype],
        batch=call.batch,
        heads=call.heads,
        groups=call.groups,
        seqlen_q=call.seqlen_q,
        seqlen_kv=call.seqlen_kv,
        size_qk=call.head_dim_qk,
        size_v=call.head_dim_v,
        scales=(call.scale, call.scale if call.bias == "pre_scale_bias" else 1.0),
        window=(left, right),
        bottom_right=call.mask.bottom_right,
        dropout=call.dropout,
        page_size=call.page_size,
        q=triple(call.q_format, strides.q),
        k=triple(call.kv_format, strides.k),
        v=triple(call.kv_format, strides.v),
        out=out,
        lse=lse,
        masked=_broadcast(call.masked_shape, strides.masked),
        bias=_broadcast(call.bias_shape, strides.bias),
        outer=(
            strides.slopes[0] if len(strides.slopes) == 2 else 0,
            strides.pages[0] if strides.pages else 0,
        ),
        varied=varied,
        shared_memory=shared_memory,
        softcap=call.softcap,
        caps_bias=call.bias == "pre_scale_bias",
        batch_invariant=call.batch_invariant,
    )


def _broadcast(
    shape: tuple[int, ...] | None, strides: tuple[int, ...]
) -> tuple[int, int, int, int]:
    """Return a tensor's strides when broadcast to [b, h, i, j]: 0 for a missing or one-element axis."""
    broadcast = [
        0 if size == 1 else stride for size, stride in zip(shape or (), strides, strict=True)
    ]
    b, h, i, j = [0] * (4 - len(broadcast)) + broadcast
    return b, h, i, j
