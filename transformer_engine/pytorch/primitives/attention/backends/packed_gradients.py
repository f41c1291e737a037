"""Gradients of causal self-attention for te.batch_invariant(), by cuDNN's deterministic kernel for packed sequences.

The kernel computes each sequence by itself, in a fixed order. Padded and dense batches are described to it as packed
sequences, because the library's kernels for dense batches have other bits. Whether a call is supported depends neither
on the number of sequences nor on their lengths, so that all compositions of a batch have the same bits.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from ..call import Attended, AttentionCall, AttentionInputs, Feature, Gradients
from . import cudnn

TAKES = frozenset(
    {
        Feature.PADDING,
        Feature.PACKED,
        Feature.PADDED_BETWEEN,
        Feature.TOP_LEFT,
        Feature.GROUPS,
        Feature.DETERMINISTIC,
        Feature.BATCH_INVARIANT,
    }
)
_LENGTH = 128  # tokens of the sequence whose support stands for that of all sequences


@functools.lru_cache(maxsize=1024)
def unsupported_reason(call: AttentionCall) -> str | None:
    """Return the reason why the gradients of a call are unsupported; None if they are supported."""
    if (feature := next((f for f in call.features if f not in TAKES), None)) is not None:
        return str(feature)
    if not call.mask.causal or call.mask.bottom_right or call.mask.arbitrary:
        return f"attn_mask_type={call.mask.name!r}, window_size={call.mask.window}; it takes causal masks"
    if call.q_format != call.kv_format:
        return "queries and keys in different formats"
    alone = replace(_packed_call(call), batch=1, seqlen_q=_LENGTH, seqlen_kv=_LENGTH)
    return cudnn.unsupported_reason(alone)


def backward(
    call: AttentionCall, inputs: AttentionInputs, attended: Attended, grad_output: Tensor
) -> Gradients:
    """Compute the gradients of q, k and v from the gradient [.., h, d_v] of the output."""
    assert attended.lse is not None
    packed = _packed_call(call)
    if call.packed:
        return cudnn.backward(packed, inputs, attended, grad_output)
    q, k, v, output, grad_output = (
        _join_sequences(call, x)
        for x in (inputs.q, inputs.k, inputs.v, attended.output, grad_output)
    )
    starts_q, lengths_q = _sequences(call.batch, call.seqlen_q, q)
    starts_kv, lengths_kv = _sequences(call.batch, call.seqlen_kv, k)
    if inputs.lengths_q is not None and inputs.lengths_kv is not None:
        lengths_q, lengths_kv = inputs.lengths_q, inputs.lengths_kv
    sequences = AttentionInputs(q, k, v, lengths_q, lengths_kv, starts_q, starts_kv)
    lse = attended.lse.transpose(1, 2).flatten(0, 1).t()  # [h, t], and contiguous as [t, h]
    found = cudnn.backward(packed, sequences, Attended(output, lse), grad_output)
    grads = (_split_sequences(call, x) for x in (found.q, found.k, found.v))
    return Gradients(*grads)


def _packed_call(call: AttentionCall) -> AttentionCall:
    """Return the call for the same sequences in packed form."""
    mask = replace(call.mask, name="padding_causal")
    return replace(
        call,
        q_format="thd",
        kv_format="thd",
        mask=mask,
        padded_between=call.padded_between or (call.mask.padding and not call.packed),
        same_lengths=call.square,
        deterministic=True,
        batch_invariant=False,
    )


def _join_sequences(call: AttentionCall, x: Tensor) -> Tensor:
    """Return a dense tensor as [b s, h, d], contiguous."""
    rows = x.transpose(0, 1) if call.q_format == "sbhd" else x
    return rows.contiguous().flatten(0, 1)


def _split_sequences(call: AttentionCall, x: Tensor) -> Tensor:
    """Return a gradient [b s, h, d] in the format of the call."""
    rows = x.unflatten(0, (call.batch, -1))
    return rows.transpose(0, 1).contiguous() if call.q_format == "sbhd" else rows


def _sequences(batch: int, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the starts [b + 1] and the lengths [b] of sequences with equal extents."""
    starts = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=like.device)
    return starts, torch.full((batch,), length, dtype=torch.int32, device=like.device)
