"""cuDNN frontend's linear attention (cudnn.linear_attention.ops, 1.29 and newer), for compute capability 10.x.

The library takes packed tokens only: equally long rows are passed as packed sequences. It computes all
options itself, without `gates`.
"""

from __future__ import annotations

from typing import Any

import torch

from ....common import optional
from ....common.dispatch import Backend, always_depends
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

MODULE = "cudnn.linear_attention.ops"
FUNCTIONS = {
    Rule.GDN: "gated_delta_net",
    Rule.GDN2: "gated_delta_net_v2",
    Rule.GDP: "gated_delta_product",
}
_SIZES = (64, 128)
# The first release with the module, and the upper bound of the extra `cuda`.
_RELEASES = ((1, 29), (2, 0))


def unsupported_reason(request: DeltaRequest) -> str | None:
    """Return the reason why the call is unsupported; None if it is supported."""
    if (reason := unsupported_by_kernels(request)) is not None:
        return reason
    if (reason := request.hardware.lacks("cudnn linear attention")) is not None:
        return reason
    sizes = request.q[-1], request.v_size
    if not set(sizes) <= set(_SIZES):
        return f"heads have sizes {sizes[0]} and {sizes[1]}; supported: 64 and 128"
    if not optional.installed("cudnn"):
        return f"nvidia-cudnn-frontend is not installed ({optional.install_command('cuda')})"
    if (reason := optional.release_problem("nvidia-cudnn-frontend", *_RELEASES)) is not None:
        return reason
    return optional.failure(MODULE, FUNCTIONS[request.spec.rule])


def run(inputs: DeltaInputs, spec: DeltaSpec) -> DeltaResult:
    """Compute a call by the library function for its rule."""
    from cudnn.linear_attention import ops

    arguments = library_arguments(differentiable_once(inputs), spec)
    output, state = getattr(ops, FUNCTIONS[spec.rule])(**arguments)
    output = output.view(*inputs.q.shape[:-1], inputs.v.shape[-1])
    return finish_results(
        output, state if Option.FINAL_STATE in spec.options else None, inputs.cu_seqlens
    )


def library_arguments(inputs: DeltaInputs, spec: DeltaSpec) -> dict[str, Any]:
    """Return the arguments for the library function: all tokens packed [B * T, ..], and the rule's options."""
    batch, length = inputs.q.shape[:2]
    bounds = inputs.cu_seqlens
    if bounds is None:
        # Not cached: autograd saves the bounds, and a captured graph writes them in each replay.
        bounds = torch.arange(
            0, (batch + 1) * length, length, dtype=torch.int32, device=inputs.q.device
        )
    tensors = {name: getattr(inputs, name) for name in ("q", "k", "v", "g", "beta")}
    if spec.rule == Rule.GDN2:
        tensors["w"] = inputs.w
    arguments: dict[str, Any] = {name: x.flatten(0, 1).contiguous() for name, x in tensors.items()}
    arguments |= {
        "cu_seqlens": bounds,
        "scale": spec.factor,
        "initial_state": inputs.initial_state,
        "output_final_state": Option.FINAL_STATE in spec.options,
        "use_qk_l2norm_in_kernel": Option.L2_NORM in spec.options,
    }
    if spec.rule != Rule.GDN:
        arguments["use_beta_sigmoid_in_kernel"] = Option.SIGMOID in spec.options
        arguments["allow_neg_eigval"] = Option.NEGATIVE in spec.options
    if spec.rule == Rule.GDN2:
        arguments["beta_guard"] = Option.GUARD in spec.options
    if spec.rule == Rule.GDP:
        arguments |= {
            "num_householder": inputs.k.shape[2],
            "safe_gate": Option.SAFE_GATE in spec.options,
            "gate_domain": "linear" if Option.LINEAR_GATE in spec.options else "log",
            "a_log": inputs.a_log,
            "dt_bias": inputs.dt_bias,
        }
    return arguments


BACKEND: Backend[DeltaRequest] = Backend(
    "cudnn",
    takes=ALL_FEATURES,
    unsupported_reason=unsupported_reason,
    bind=binder(run),
    opaque=True,
    batch_dependent=always_depends("by chunks that begin with the first token of a call"),
)
