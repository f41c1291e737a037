"""The attention of any request, in plain float32 torch operations on any device; it never refuses one.

It holds [b, h, s_q, s_kv] float32 matrices: the other backends are there to avoid them.
"""

from __future__ import annotations

from torch import Tensor

from .....common.dispatch import Backend
from .. import layout, mask
from ..autograd import Kernels, attend
from ..dropout import random_state
from ..request import Attended, AttentionInputs, AttentionRequest, AttentionResult, Gradients
from . import dense


def forward(
    request: AttentionRequest, inputs: AttentionInputs, round_p: dense.Rounding | None = None
) -> Attended:
    """Attention through dense matrices; round_p replaces the probabilities before they are multiplied."""
    rng_state = random_state(inputs.q.device) if request.dropout > 0.0 else None
    q, k, v = layout.dense_qkv(request, inputs)
    terms = _terms(request, inputs)._replace(round_p=round_p)
    out, lse, max_logit = dense.forward(q, k, v, terms, rng_state)
    return Attended(
        layout.from_bhsd(request, inputs, out),
        layout.rows_of(request, inputs, lse),
        rng_state,
        max_logit if request.max_logit else None,
    )


def backward(
    request: AttentionRequest,
    inputs: AttentionInputs,
    attended: Attended,
    grad_output: Tensor,
    round_p: dense.Rounding | None = None,
    round_ds: dense.Rounding | None = None,
) -> Gradients:
    """Gradients through dense matrices; the probabilities are computed again."""
    assert attended.lse is not None
    q, k, v = layout.dense_qkv(request, inputs)
    found = dense.backward(
        layout.queries_to_bhsd(request, inputs, grad_output),
        layout.queries_to_bhsd(request, inputs, attended.output),
        layout.dense_rows(request, inputs, attended.lse),
        q,
        k,
        v,
        _terms(request, inputs)._replace(round_p=round_p, round_ds=round_ds),
        attended.rng_state,
    )
    grad_bias = found.bias
    if request.bias == "pre_scale_bias":
        assert grad_bias is not None
        grad_bias = grad_bias * request.scale
    return Gradients(
        layout.from_bhsd(request, inputs, found.q),
        layout.keys_from_bhsd(request, inputs, found.k),
        layout.keys_from_bhsd(request, inputs, found.v),
        None if inputs.bias is None else grad_bias,
        found.sink,
    )


def run(request: AttentionRequest, inputs: AttentionInputs) -> AttentionResult:
    """The attention of a request, differentiable in q, k, v, bias, sink and what score_mod holds."""
    if request.score_mod is None:
        return attend(KERNELS, request, inputs)
    # score_mod may hold tensors that want gradients: autograd sees all of it.
    attended = forward(request, inputs)
    return AttentionResult(attended.output.flatten(-2), attended.max_logit)


def _terms(request: AttentionRequest, inputs: AttentionInputs) -> dense.Terms:
    return dense.Terms(
        request.scale,
        additive_bias(request, inputs),
        inputs.sink,
        mask.visible(request, inputs),
        request.dropout,
        request.score_mod,
    )


def additive_bias(request: AttentionRequest, inputs: AttentionInputs) -> Tensor | None:
    """What is added to scale * q k^T: (q k^T + bias) * scale is scale * q k^T + bias * scale."""
    if request.bias == "pre_scale_bias":
        assert inputs.bias is not None
        return inputs.bias * request.scale
    if request.bias == "alibi":
        assert inputs.slopes is not None
        slopes = inputs.slopes.float().reshape(-1, request.heads, 1, 1)
        return -slopes * mask.distance(request, inputs).abs()
    return inputs.bias


def refuses(request: AttentionRequest) -> str | None:
    """Why this backend cannot take the request; None if it can."""
    if not request.switches.unfused:
        return "NVTE_UNFUSED_ATTN=0"
    if request.fp8 is not None:
        return "FP8 attention; its emulation rounds tensors before it asks here"
    return None


KERNELS = Kernels("reference", forward, backward, traceable=True)
BACKEND = Backend("reference", run, refuses)
