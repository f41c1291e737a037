"""Attention from a few queries to a long cache, which all multiprocessors read once, for any batch size."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from ....runtime.launching import perform, processors
from ..call import Attended, AttentionCall, AttentionInputs
from .triton_layout import Strides, contiguous_triple, lse_triple, problem, strides

if TYPE_CHECKING:
    from .....common.kernels.program import Program

LONGEST_QUERY = 16


def takes(call: AttentionCall) -> bool:
    """Return whether a call is a decoding step without gradients and without a bias or mask tensor.

    The ranges of keys depend on the batch, and the tile on the number of queries: such a call is not batch-invariant.
    """
    if call.batch_invariant:
        return False
    if call.needs_gradient or call.max_logit or call.dropout > 0.0 or call.seqlen_q > LONGEST_QUERY:
        return False
    return (
        call.bias in ("no_bias", "alibi") and not call.mask.arbitrary and not call.padding_tensors
    )


def forward(call: AttentionCall, inputs: AttentionInputs) -> Attended:
    """Compute the output, without lse, for a call that `takes` supports."""
    q = inputs.q
    program = _program(call, strides(call, inputs), q.get_device())
    # packed: tokens outside the sequences are not visited
    make = torch.zeros if call.packed else torch.empty
    out = make((*q.shape[:-1], call.head_dim_v), dtype=q.dtype, device=q.device)
    perform(program, (*inputs[:7], inputs.slopes, inputs.page_table, inputs.sink, out))
    return Attended(out)


@functools.lru_cache(maxsize=1024)
def _program(call: AttentionCall, strides: Strides, device: int) -> Program:
    from .....common.kernels import attention_programs

    count, shared_memory = processors(device)
    out = contiguous_triple(call.q_format, call.batch, call.seqlen_q, call.heads, call.head_dim_v)
    p = problem(call, strides, out, lse_triple(call, None), shared_memory)
    splits = call.num_splits if call.num_splits > 1 else 0
    follows = call.hardware.has("dependent launch")
    return attention_programs.decoding(p, count, splits, follows, call.packed)
