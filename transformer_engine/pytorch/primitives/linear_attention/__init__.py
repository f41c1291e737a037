"""Linear attention by gated delta rules, differentiable in all floating-point inputs; table of backends."""

from __future__ import annotations

from ....common.dispatch import Operator, Table
from ...runtime.autograd import without_autocast
from . import chunked, cudnn, fla, reference
from .operators import TracedLinearAttention
from .request import (
    LinearAttentionInputs,
    LinearAttentionRequest,
    LinearAttentionResult,
    LinearAttentionSpec,
    key_of,
)


@without_autocast
def linear_attention(inputs: LinearAttentionInputs, spec: LinearAttentionSpec) -> LinearAttentionResult:
    """Compute the output [B, T, H, dv] in q's dtype, and the final state [N, H, dv, dk] in float32 if requested.

    `reference` has the recurrence, `LinearAttentionInputs` the shapes. torch.autocast has no effect.
    """
    return TABLE.bound(key_of(inputs, spec))(*inputs)


_TRACED = TracedLinearAttention(linear_attention)


def _operator_of(request: LinearAttentionRequest) -> Operator:
    def call(*tensors) -> LinearAttentionResult:
        return _TRACED(request.spec, *tensors)

    # On fake tensors the operators allocate their results.
    return Operator(call, call)


TABLE: Table[LinearAttentionRequest] = Table(
    "linear_attention",
    (cudnn.BACKEND, fla.BACKEND, chunked.BACKEND, reference.BACKEND),
    describe=LinearAttentionRequest,
    operator=_operator_of,
)
