"""Attention of a few queries to a long cache: the cache is read once, by all processors, whatever the batch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from ....primitives.launching import processors, run, run_into
from ..request import Attended, AttentionInputs, AttentionRequest
from .triton_layout import Strides, contiguous_triple, lse_triple, problem, strides

if TYPE_CHECKING:
    from .....common.kernels.launch import Launch

LONGEST_QUERY = 16


class _Plan(NamedTuple):
    stretches: Launch
    merging: Launch


def takes(r: AttentionRequest) -> bool:
    """Is this a step of decoding that needs neither gradients nor logits that vary from pair to pair?"""
    if r.needs_gradient or r.max_logit or r.dropout > 0.0 or r.seqlen_q > LONGEST_QUERY:
        return False
    return r.bias in ("no_bias", "alibi") and not r.mask.arbitrary and not r.padding_tensors


def forward(request: AttentionRequest, inputs: AttentionInputs) -> Attended:
    """The output of a request that takes() takes; no lse."""
    q = inputs.q
    plan = _plan(request, strides(request, inputs), q.get_device())
    make = torch.zeros if request.packed else torch.empty  # packed: tokens of no sequence are not visited
    out = make((*q.shape[:-1], request.head_dim_v), dtype=q.dtype, device=q.device)
    partial, level = run(plan.stretches, (*inputs[:7], inputs.slopes, inputs.page_table))
    run_into(plan.merging, (partial, level, inputs.sink, inputs.lengths_q, inputs.starts_q, out), q.device)
    return Attended(out)


@functools.lru_cache(maxsize=1024)
def _plan(request: AttentionRequest, given: Strides, device: int) -> _Plan:
    from .....common.kernels import attention_decode as kernels  # it imports triton

    r, (count, shared_memory) = request, processors(device)
    out = contiguous_triple(r.q_format, r.batch, r.seqlen_q, r.heads, r.head_dim_v)
    p = problem(r, given, out, lse_triple(r, None), shared_memory)
    launch, splits = kernels.stretches(p, count, r.num_splits if r.num_splits > 1 else 0)
    return _Plan(launch, kernels.merging(p, splits, follows=r.capability >= (9, 0), packed=r.packed))
