"""The attention of any request, in plain float32 torch operations on any device; it never refuses one.

It holds [b, h, s_q, s_kv] float32 matrices: the other backends are there to avoid them.
"""

from __future__ import annotations

from torch import Tensor

from ....common.dispatch import Backend
from . import dense, layout
from .dropout import random_state
from .passes import Bound, Passes, Whole
from .request import Attended, AttentionInputs, AttentionRequest, AttentionResult, Feature, Gradients
from .visible import distance, visible


def forward(
    request: AttentionRequest, inputs: AttentionInputs, round_p: dense.Rounding | None = None
) -> Attended:
    """Attention through dense matrices; round_p replaces the probabilities before they are multiplied."""
    rng_state = random_state(inputs.q.device) if request.options.dropout > 0.0 else None
    q, k, v = layout.dense_qkv(request, inputs)
    terms = _terms(request, inputs)._replace(round_p=round_p)
    out, lse, max_logit = dense.forward(q, k, v, terms, rng_state)
    return Attended(
        layout.from_bhsd(request, inputs, out),
        layout.rows_of(request, inputs, lse),
        rng_state,
        max_logit if request.options.max_logit else None,
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
    if request.options.bias == "pre_scale_bias":
        assert grad_bias is not None
        grad_bias = grad_bias * request.options.scale
    return Gradients(
        layout.from_bhsd(request, inputs, found.q),
        layout.keys_from_bhsd(request, inputs, found.k),
        layout.keys_from_bhsd(request, inputs, found.v),
        None if inputs.bias is None else grad_bias,
        found.sink,
    )


def run(request: AttentionRequest, inputs: AttentionInputs) -> AttentionResult:
    """The attention of a request in operations that autograd sees: score_mod may hold tensors that want gradients."""
    attended = forward(request, inputs)
    return AttentionResult(attended.output.flatten(-2), attended.max_logit)


def _terms(request: AttentionRequest, inputs: AttentionInputs) -> dense.Terms:
    return dense.Terms(
        request.options.scale,
        additive_bias(request, inputs),
        inputs.sink,
        visible(request, inputs),
        request.options.dropout,
        request.options.score_mod,
    )


def additive_bias(request: AttentionRequest, inputs: AttentionInputs) -> Tensor | None:
    """What is added to scale * q k^T: (q k^T + bias) * scale is scale * q k^T + bias * scale."""
    if request.options.bias == "pre_scale_bias":
        assert inputs.bias is not None
        return inputs.bias * request.options.scale
    if request.options.bias == "alibi":
        assert inputs.slopes is not None
        slopes = inputs.slopes.float().reshape(-1, request.shape.heads, 1, 1)
        return -slopes * distance(request, inputs).abs()
    return inputs.bias


def refuses(request: AttentionRequest) -> str | None:
    """Why this backend cannot take the request; None if it can."""
    return None if request.device.switches.unfused else "NVTE_UNFUSED_ATTN=0"


def bind(request: AttentionRequest) -> Bound:
    """The two passes; of a score_mod, what autograd sees through."""
    return PASSES if request.options.score_mod is None else WHOLE


# Not FP8: its emulation rounds tensors before it asks here.
TAKES = frozenset(Feature) - {Feature.FP8}
PASSES = Passes("reference", forward, backward)
WHOLE = Whole("reference", run)
BACKEND = Backend("reference", takes=TAKES, refuses=refuses, bind=bind)
