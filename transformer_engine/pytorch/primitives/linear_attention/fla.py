"""flash-linear-attention (package fla-core): chunked Triton kernels for NVIDIA and AMD GPUs.

Packed sequences copy their bounds to the host once per call. Chunks have 64 tokens. The first of
several equal calls tunes the kernels, which takes some seconds.
"""

from __future__ import annotations

from typing import Any

from ....common import optional
from ....common.dispatch import Backend, always_depends
from ....common.kernels.launch import unavailable_reason
from .gates import erase_gate, log_decay
from .library import differentiable_once, finish_results, unsupported_by_kernels
from .request import (
    ALL_FEATURES,
    DeltaInputs,
    DeltaRequest,
    DeltaResult,
    DeltaSpec,
    Option,
    Rule,
    binder,
)

_SMALLEST_HEAD, _LARGEST_HEAD = 16, 256
_RELEASES = (0, 6), (0, 7)  # from the first release with Gated DeltaNet 2 to the last tested one
# Module and function of each rule.
_FUNCTIONS = {
    Rule.GDN: ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    Rule.GDN2: ("fla.ops.gdn2", "chunk_gdn2"),
    Rule.GDP: ("fla.ops.gated_delta_product", "chunk_gated_delta_product"),
}


def unsupported_reason(request: DeltaRequest) -> str | None:
    """Return the reason why the call is unsupported; None if it is supported."""
    if (reason := unsupported_by_kernels(request)) is not None:
        return reason
    if (
        reason := unavailable_reason(request.hardware) or request.hardware.lacks("triton kernels")
    ) is not None:
        return reason
    size = request.q[-1]
    if not _SMALLEST_HEAD <= size <= _LARGEST_HEAD:
        return f"heads of queries and keys have size {size}; supported: {_SMALLEST_HEAD} to {_LARGEST_HEAD}"
    if request.needs_gradient and Option.LINEAR_GATE in request.spec.options:
        return "its gradient of a decay is a difference of sums, which loses all digits of a linear gate near 0"
    if not optional.installed("fla"):
        return f"fla-core is not installed ({optional.install_command('linear-attention')})"
    if (reason := optional.release_problem("fla-core", *_RELEASES)) is not None:
        return reason
    if (
        request.needs_gradient
        and request.spec.rule != Rule.GDN2
        and request.hardware.has("hopper instructions")
    ):
        triton = optional.release("triton")
        if (3, 4) <= triton < (3, 7) and not optional.installed("tilelang"):
            return f"triton {'.'.join(map(str, triton))} computes its gradients wrong on Hopper; install triton 3.7.1"
    return optional.failure(*_FUNCTIONS[request.spec.rule])


def run(inputs: DeltaInputs, spec: DeltaSpec) -> DeltaResult:
    """Compute a call, on any device for which Triton compiles, or that its interpreter serves."""
    bounds = inputs.cu_seqlens
    options: dict[str, Any] = {
        "scale": spec.factor,
        "output_final_state": Option.FINAL_STATE in spec.options,
        "use_qk_l2norm_in_kernel": Option.L2_NORM in spec.options,
        # The library caches chunk indices by the identity of this tensor. A new alias per call has no entry: the caller
        # may have written to the tensor, or called in inference mode, whose tensors autograd cannot save.
        "cu_seqlens": None if bounds is None else bounds.detach(),
    }
    gates = {"g": log_decay(inputs, spec), "beta": erase_gate(inputs, spec)}
    inputs = inputs._replace(**gates, a_log=None, dt_bias=None)
    output, state = _RULES[spec.rule](differentiable_once(inputs), options)
    return finish_results(output, state, inputs.cu_seqlens)


def _gated_delta_net(inputs: DeltaInputs, options: dict[str, Any]) -> DeltaResult:
    from fla.ops import gated_delta_rule

    compute: Any = gated_delta_rule.chunk_gated_delta_rule  # its decorator hides the signature
    state = inputs.initial_state
    return compute(*inputs[:5], initial_state=state, state_v_first=True, **options)


def _gated_delta_net_2(inputs: DeltaInputs, options: dict[str, Any]) -> DeltaResult:
    from fla.ops import gdn2

    compute: Any = gdn2.chunk_gdn2
    q, k, v, decay, erase, write = inputs[:6]
    state = inputs.initial_state
    return compute(
        q, k, v, decay, erase.to(q.dtype), write, initial_state=state, state_v_first=True, **options
    )


def _gated_delta_product(inputs: DeltaInputs, options: dict[str, Any]) -> DeltaResult:
    from fla.ops import gated_delta_product

    compute: Any = gated_delta_product.chunk_gated_delta_product
    # This function takes the state as [dk, dv], and the updates of all tokens along one axis.
    state = None if inputs.initial_state is None else inputs.initial_state.transpose(-1, -2)
    k, v, beta = (x.flatten(1, 2) for x in (inputs.k, inputs.v, inputs.beta))
    output, state = compute(
        inputs.q, k, v, inputs.g, beta, inputs.k.shape[2], initial_state=state, **options
    )
    return output, None if state is None else state.transpose(-1, -2)


_RULES = {Rule.GDN: _gated_delta_net, Rule.GDN2: _gated_delta_net_2, Rule.GDP: _gated_delta_product}


BACKEND: Backend[DeltaRequest] = Backend(
    "fla",
    takes=ALL_FEATURES,
    unsupported_reason=unsupported_reason,
    bind=binder(run),
    opaque=True,
    batch_dependent=always_depends("by chunks that begin with the first token of a call"),
)
