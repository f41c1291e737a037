"""cuDNN frontend's linear attention (cudnn.linear_attention.ops, 1.29 and newer), for compute capability 10.x.

The library takes packed tokens only: rows of equal length are passed as packed sequences. All options are its own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ....common import optional
from ....common.dispatch import Backend
from .library import differentiable_once, finished
from .request import (
    ALL_FEATURES,
    FINAL_STATE,
    GDN,
    GDN2,
    GDP,
    GUARD,
    L2_NORM,
    LINEAR_GATE,
    NEGATIVE,
    SAFE_GATE,
    SIGMOID,
    LinearAttentionInputs,
    LinearAttentionRequest,
    LinearAttentionResult,
    LinearAttentionSpec,
    unsupported_by_kernels,
)

MODULE = "cudnn.linear_attention.ops"
FUNCTIONS = {GDN: "gated_delta_net", GDN2: "gated_delta_net_v2", GDP: "gated_delta_product"}
_SIZES = (64, 128)
_MINIMUM = (1, 29)


def unsupported_reason(request: LinearAttentionRequest) -> str | None:
    """Return the reason why the call is unsupported; None if it is supported."""
    if (reason := unsupported_by_kernels(request)) is not None:
        return reason
    if (reason := request.hardware.lacks("cudnn linear attention")) is not None:
        return reason
    sizes = request.q[-1], request.v_size
    if not set(sizes) <= set(_SIZES):
        return f"heads have sizes {sizes[0]} and {sizes[1]}; it takes 64 and 128"
    if not optional.installed("cudnn"):
        return f"nvidia-cudnn-frontend is not installed ({optional.install_command('cuda')})"
    release = optional.release("nvidia-cudnn-frontend")
    if release < _MINIMUM:
        found = ".".join(map(str, release))
        return f"nvidia-cudnn-frontend {found} < 1.29; pip install --upgrade 'nvidia-cudnn-frontend>=1.29,<2'"
    return optional.failure(MODULE, FUNCTIONS[request.spec.rule])


def run(inputs: LinearAttentionInputs, spec: LinearAttentionSpec) -> LinearAttentionResult:
    """Compute a call by the library's function of its rule."""
    from cudnn.linear_attention import ops

    arguments = arguments_of(differentiable_once(inputs), spec)
    output, state = getattr(ops, FUNCTIONS[spec.rule])(**arguments)
    output = output.view(*inputs.q.shape[:-1], inputs.v.shape[-1])
    return finished(output, state if FINAL_STATE in spec.options else None, inputs.cu_seqlens)


def arguments_of(inputs: LinearAttentionInputs, spec: LinearAttentionSpec) -> dict[str, Any]:
    """Return the arguments of the library's function: all tokens packed [B * T, ..], and the options of the rule."""
    batch, length = inputs.q.shape[:2]
    bounds = inputs.cu_seqlens
    if bounds is None:
        bounds = _equal_bounds(batch, length, inputs.q.device)
    tensors = {name: getattr(inputs, name) for name in ("q", "k", "v", "g", "beta")}
    if spec.rule == GDN2:
        tensors["w"] = inputs.w
    arguments: dict[str, Any] = {name: x.flatten(0, 1).contiguous() for name, x in tensors.items()}
    arguments |= {
        "cu_seqlens": bounds,
        "scale": spec.factor,
        "initial_state": inputs.initial_state,
        "output_final_state": FINAL_STATE in spec.options,
        "use_qk_l2norm_in_kernel": L2_NORM in spec.options,
    }
    if spec.rule != GDN:
        arguments["use_beta_sigmoid_in_kernel"] = SIGMOID in spec.options
        arguments["allow_neg_eigval"] = NEGATIVE in spec.options
    if spec.rule == GDN2:
        arguments["beta_guard"] = GUARD in spec.options
    if spec.rule == GDP:
        arguments |= {
            "num_householder": inputs.k.shape[2],
            "safe_gate": SAFE_GATE in spec.options,
            "gate_domain": "linear" if LINEAR_GATE in spec.options else "log",
            "a_log": inputs.a_log,
            "dt_bias": inputs.dt_bias,
        }
    return arguments


@functools.lru_cache(maxsize=64)
def _equal_bounds(batch: int, length: int, device: torch.device) -> Tensor:
    return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)


def bind(request: LinearAttentionRequest):
    """Return the function of inputs that computes a call."""

    def call(*tensors: Tensor | None) -> LinearAttentionResult:
        return run(LinearAttentionInputs(*tensors), request.spec)  # pyright: ignore[reportArgumentType]

    return call


BACKEND: Backend[LinearAttentionRequest] = Backend(
    "cudnn", takes=ALL_FEATURES, unsupported_reason=unsupported_reason, bind=bind, opaque=True
)
