"""Attention of a few queries to a long cache: the cache is read once, by all processors, whatever the batch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from ....runtime.launching import perform, processors
from ..request import Attended, AttentionInputs, AttentionRequest
from .triton_layout import Strides, contiguous_triple, lse_triple, problem, strides

if TYPE_CHECKING:
    from .....common.kernels.program import Program

LONGEST_QUERY = 16


def takes(r: AttentionRequest) -> bool:
    """Is this a step of decoding that needs neither gradients nor logits that vary from pair to pair?"""
    if (
        r.options.needs_gradient
        or r.options.max_logit
        or r.options.dropout > 0.0
        or r.shape.seqlen_q > LONGEST_QUERY
    ):
        return False
    return (
        r.options.bias in ("no_bias", "alibi")
        and not r.options.mask.arbitrary
        and not r.options.padding_tensors
    )


def forward(request: AttentionRequest, inputs: AttentionInputs) -> Attended:
    """The output of a request that takes() takes; no lse."""
    q = inputs.q
    program = _program(request, strides(request, inputs), q.get_device())
    make = torch.zeros if request.packed else torch.empty  # packed: tokens of no sequence are not visited
    out = make((*q.shape[:-1], request.shape.head_dim_v), dtype=q.dtype, device=q.device)
    perform(program, (*inputs[:7], inputs.slopes, inputs.page_table, inputs.sink, out))
    return Attended(out)


@functools.lru_cache(maxsize=1024)
def _program(request: AttentionRequest, given: Strides, device: int) -> Program:
    from .....common.kernels import attention_programs  # it imports triton

    r, (count, shared_memory) = request, processors(device)
    out = contiguous_triple(
        r.shape.q_format, r.shape.batch, r.shape.seqlen_q, r.shape.heads, r.shape.head_dim_v
    )
    p = problem(r, given, out, lse_triple(r, None), shared_memory)
    splits = r.options.num_splits if r.options.num_splits > 1 else 0
    follows = r.device.capability >= (9, 0)
    return attention_programs.decoding(p, count, splits, follows, r.packed)
