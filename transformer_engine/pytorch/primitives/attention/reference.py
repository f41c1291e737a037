"""Attention for any call in plain float32 torch operations on any device.

It allocates float32 matrices [b, h, s_q, s_kv], which the other backends avoid.
"""

from __future__ import annotations

from torch import Tensor

from ....common.dispatch import Backend
from . import dense, layout
from .call import Attended, AttentionCall, AttentionInputs, AttentionResult, Feature, Gradients
from .dropout import random_state
from .passes import Bound, Differentiable, Passes
from .visible import distance, visible


def forward(
    call: AttentionCall, inputs: AttentionInputs, round_p: dense.Rounding | None = None
) -> Attended:
    """Compute attention by dense matrices; round_p rounds the probabilities before their product."""
    rng_state = random_state(inputs.q.device) if call.dropout > 0.0 else None
    q, k, v = layout.dense_qkv(call, inputs)
    terms = _terms(call, inputs)._replace(round_p=round_p)
    out, lse, max_logit = dense.forward(q, k, v, terms, rng_state)
    return Attended(
        layout.from_bhsd(call, inputs, out),
        layout.pack_rows(call, inputs, lse),
        rng_state,
        max_logit if call.max_logit else None,
    )


def backward(
    call: AttentionCall,
    inputs: AttentionInputs,
    attended: Attended,
    grad_output: Tensor,
    round_p: dense.Rounding | None = None,
    round_ds: dense.Rounding | None = None,
) -> Gradients:
    """Compute gradients by dense matrices, with recomputed probabilities."""
    assert attended.lse is not None
    q, k, v = layout.dense_qkv(call, inputs)
    gradients = dense.backward(
        layout.queries_to_bhsd(call, inputs, grad_output),
        layout.queries_to_bhsd(call, inputs, attended.output),
        layout.dense_rows(call, inputs, attended.lse),
        q,
        k,
        v,
        _terms(call, inputs)._replace(round_p=round_p, round_ds=round_ds),
        attended.rng_state,
    )
    grad_bias = gradients.bias
    if call.bias == "pre_scale_bias":
        assert grad_bias is not None
        grad_bias = grad_bias * call.scale
    return Gradients(
        layout.from_bhsd(call, inputs, gradients.q),
        layout.keys_from_bhsd(call, inputs, gradients.k),
        layout.keys_from_bhsd(call, inputs, gradients.v),
        None if inputs.bias is None else grad_bias,
        gradients.sink,
    )


def run(call: AttentionCall, inputs: AttentionInputs) -> AttentionResult:
    """Compute attention in operations that autograd sees: score_mod tensors may require gradients."""
    attended = forward(call, inputs)
    return AttentionResult(attended.output.flatten(-2), attended.max_logit)


def _terms(call: AttentionCall, inputs: AttentionInputs) -> dense.Terms:
    return dense.Terms(
        call.scale,
        additive_bias(call, inputs),
        inputs.sink,
        visible(call, inputs),
        call.dropout,
        call.score_mod,
        softcap=call.softcap,
        caps_bias=call.bias == "pre_scale_bias",
        blocks=call.batch_invariant,
    )


def additive_bias(call: AttentionCall, inputs: AttentionInputs) -> Tensor | None:
    """Return the bias added to scale * q k^T: (q k^T + bias) * scale is scale * q k^T + bias * scale."""
    if call.bias == "pre_scale_bias":
        assert inputs.bias is not None
        return inputs.bias * call.scale
    if call.bias == "alibi":
        assert inputs.slopes is not None
        slopes = inputs.slopes.float().reshape(-1, call.heads, 1, 1)
        return -slopes * distance(call, inputs).abs()
    return inputs.bias


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return the reason why the call is unsupported; None if it is supported."""
    if not call.switches.unfused:
        return "NVTE_UNFUSED_ATTN=0"
    if call.batch_invariant and call.device_type == "cuda":
        return "on a GPU a row's result depends on the other rows, by products that are planned for their number"
    if call.batch_invariant and call.score_mod is not None and call.needs_gradient:
        return "the gradient of score_mod, by torch's operations, depends on the other rows"
    return None


def bind(call: AttentionCall) -> Bound:
    """Return the two passes; with a score_mod, the operations that autograd differentiates."""
    return PASSES if call.score_mod is None else WHOLE


# Without FP8: its emulation quantizes tensors before it calls this backend.
TAKES = frozenset(Feature) - {Feature.FP8}
PASSES = Passes("reference", forward, backward)
WHOLE = Differentiable("reference", run)
BACKEND = Backend("reference", takes=TAKES, unsupported_reason=unsupported_reason, bind=bind)
