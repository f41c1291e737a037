"""Linear attention by gated delta rules: the function `linear_attention` and the table of its backends."""

from __future__ import annotations

import torch

from ....common.dispatch import Operator, Table
from ...runtime.autograd import disable_autocast
from . import chunked, cudnn, fla, reference
from .operators import TracedLinearAttention
from .request import (
    DeltaInputs,
    DeltaRequest,
    DeltaResult,
    DeltaSpec,
    Rule,
)


@disable_autocast
def linear_attention(inputs: DeltaInputs, spec: DeltaSpec) -> DeltaResult:
    """Compute the output [B, T, H, dv] in q's dtype, and the final state [N, H, dv, dk] in float32 if requested.

    The module `reference` defines the recurrence, and `DeltaInputs` the shapes. All floating-point inputs have
    gradients. torch.autocast has no effect.
    """
    return TABLE.bound(_request_key(inputs, spec))(*inputs)


def _request_key(inputs: DeltaInputs, spec: DeltaSpec) -> tuple[object, ...]:
    """Return the request fields for a call."""
    q, cu_seqlens = inputs.q, inputs.cu_seqlens
    return (
        spec,
        tuple(q.shape),
        inputs.v.shape[-1],
        inputs.k.shape[2] if spec.rule == Rule.GDP else 1,
        None if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        q.dtype,
        q.device.type,
        inputs.initial_state is not None,
        torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs),
    )


_TRACED = TracedLinearAttention(linear_attention)


def _make_operator(request: DeltaRequest) -> Operator:
    def call(*tensors) -> DeltaResult:
        return _TRACED(request.spec, *tensors)

    # Fake tensors need no separate function: on them the operators only allocate their results.
    return Operator(call, call)


TABLE: Table[DeltaRequest] = Table(
    "linear_attention",
    (cudnn.BACKEND, fla.BACKEND, chunked.BACKEND, reference.BACKEND),
    describe=DeltaRequest,
    operator=_make_operator,
)
