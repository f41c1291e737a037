"""cuDNN's FP8 attention: from q, k, v codes to o codes; the softmax's numerators P are FP8 inside too.

A value is code x descale. The kernel itself quantizes P and o, and dP, dq, dk, dv in the backward pass: it multiplies
them by a scale and returns their largest magnitude before the multiplication as an amax.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .....common.memory import Memory
from ....runtime.device import get_cudnn_version
from ..call import AttentionCall, AttentionInputs, Feature
from .cudnn_graph import MOST_PLANS, CudnnPlan, Description, planned, unavailable_reason
from .cudnn_plan import Strided, Tensors, bottom_right
from .limits import UPGRADE_CUDNN, unsupported_by_environment

# Without dropout: a backward pass in 16 bits would drop other probabilities.
TAKES = frozenset(
    {
        Feature.FP8,
        Feature.PADDING,
        Feature.WINDOW,
        Feature.TOP_LEFT,
        Feature.GROUPS,
        Feature.TWO_SIZES,
        Feature.DETERMINISTIC,
    }
)
FORWARD_HEAD_SIZES = range(16, 257, 16)
BACKWARD_HEAD_SIZE = 128
# First versions on 10.x and 11.0 for heads of 192/128, for deterministic gradients, and for a scale
# from the tensor itself: NVIDIA's rules. cuDNN 9.24 computes wrong zeros for outputs in 16
# bits; this package's outputs are codes.
_TWO_SIZES, _DETERMINISTIC, _CURRENT = (9, 21, 0), (9, 18, 0), (9, 14, 0)
DECODED = "attention of the decoded tensors in 16 bits takes its place"


class CudnnFP8Output(NamedTuple):
    """Output codes [.., h, d_v]; lse as in Attended; amax float32 [2] for output and softmax."""

    output: Tensor
    lse: Tensor | None
    amax: Tensor


class CudnnFP8Gradients(NamedTuple):
    """Gradient codes; amax float32 [4] for dq, dk, dv and dP."""

    q: Tensor
    k: Tensor
    v: Tensor
    amax: Tensor


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return the reason why the FP8 forward pass does not support the call; None if it does."""
    reason = unsupported_by_environment(call, "cudnn fp8 attention", other_kind="1")
    if reason is None and call.hardware.has("tensor memory"):
        reason = _unsupported_on_blackwell(call)
    if reason is not None:
        return f"{reason}; {DECODED}"
    if bottom_right(call):
        return "a bottom-right diagonal over sequences of unequal lengths"
    for size in (call.head_dim_qk, call.head_dim_v):
        if size not in FORWARD_HEAD_SIZES:
            return f"head size {size}; supported: multiples of 16 up to 256"
    return unavailable_reason()


def _unsupported_on_blackwell(call: AttentionCall) -> str | None:
    """Return the reason why FP8 attention on compute capability 10.x and 11.0 does not support the call, or None."""
    sizes = call.head_dim_qk, call.head_dim_v
    if max(sizes) > 128 and sizes != (192, 128):
        return f"head sizes {sizes[0]} and {sizes[1]} on {call.hardware.title}; supported: up to 128, and 192/128"
    version, row = get_cudnn_version(), call.hardware
    for requested, first, what in (
        (True, row.cudnn_fp8, "these kernels"),
        (sizes == (192, 128), _TWO_SIZES, "heads of 192/128"),
        (call.demands_determinism, _DETERMINISTIC, "deterministic gradients"),
        (call.fp8 == "current", _CURRENT, "current scaling"),
    ):
        if requested and version < first:
            release, least = (".".join(map(str, each)) for each in (version, first))
            missed = f"cuDNN {release} has no FP8 attention with {what} on {row.title}"
            return f"{missed}, {least} has; {UPGRADE_CUDNN}"
    return None


def unsupported_backward(call: AttentionCall) -> str | None:
    """Return the reason why the FP8 backward pass does not support the call; None if it does."""
    if call.hardware.has("cudnn fp8 gradients of all heads"):
        two_sizes = call.head_dim_qk != call.head_dim_v
        reason = call.hardware.lacks("cudnn fp8 gradients of two sizes") if two_sizes else None
        return reason or unsupported_reason(call)
    if not call.head_dim_qk == call.head_dim_v == BACKWARD_HEAD_SIZE:
        return f"head sizes {call.head_dim_qk} and {call.head_dim_v} in the backward pass; supported: 128"
    return unsupported_reason(call)


def fp8_options(tensors: Tensors) -> dict[str, Any]:
    """Return the shared options under their names in the FP8 operations."""
    options = tensors.options()
    for name in ("left_bound", "right_bound"):
        bound = options.pop(f"diagonal_band_{name}", None)
        if bound is not None:
            options[name] = bound
    return options


def describe_forward(
    call: AttentionCall, strided: Strided, code: torch.dtype, output_code: torch.dtype, **where: Any
) -> Description:
    """Describe the graph from q, k, v codes to output codes, stats, and the output and softmax amaxes."""
    description = Description(code, **where)
    tensors = Tensors(call, strided, description, code)
    output, stats, amax_s, amax_output = description.graph.sdpa_fp8(
        q=tensors.given("q", call.heads, call.head_dim_qk, strided.q, True),
        k=tensors.given("k", call.groups, call.head_dim_qk, strided.k, False),
        v=tensors.given("v", call.groups, call.head_dim_v, strided.v, False),
        **{role: description.scalar(role) for role in _FORWARD_SCALES},
        **fp8_options(tensors),
        scale_o=description.scalar("scale_output"),
        generate_stats=call.needs_gradient,
    )
    tensors.dense("output", call.heads, call.head_dim_v, True, output, output_code)
    if call.needs_gradient:
        shape, strides, ragged = tensors.row_statistics()
        description.output("stats", stats, shape, strides, ragged=ragged)
    for role, amax in (("amax_s", amax_s), ("amax_output", amax_output)):
        description.output(role, amax, (1, 1, 1, 1))
    return description


_FORWARD_SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s")


def describe_backward(
    call: AttentionCall,
    strided: Strided,
    code: torch.dtype,
    output_code: torch.dtype,
    grad_output_code: torch.dtype,
    grad_code: torch.dtype,
    **where: Any,
) -> Description:
    """Describe the graph from codes of q, k, v, output and grad_output, and stats, to dq, dk, dv codes and amaxes."""
    description = Description(code, **where)
    tensors = Tensors(call, strided, description, code)
    assert strided.grad_output is not None
    shape, strides, ragged = tensors.row_statistics()
    grads = description.graph.sdpa_fp8_backward(
        q=tensors.given("q", call.heads, call.head_dim_qk, strided.q, True),
        k=tensors.given("k", call.groups, call.head_dim_qk, strided.k, False),
        v=tensors.given("v", call.groups, call.head_dim_v, strided.v, False),
        o=tensors.dense("output", call.heads, call.head_dim_v, True, dtype=output_code),
        dO=tensors.given(
            "grad_output",
            call.heads,
            call.head_dim_v,
            strided.grad_output,
            True,
            dtype=grad_output_code,
        ),
        stats=description.tensor("stats", shape, strides, ragged=ragged),
        **{
            role: description.scalar(role)
            for role in ("descale_q", "descale_k", "descale_v", "descale_s")
        },
        descale_o=description.scalar("descale_output"),
        descale_dO=description.scalar("descale_grad_output"),
        descale_dP=description.scalar("descale_dp"),
        scale_s=description.scalar("scale_s"),
        scale_dQ=description.scalar("scale_grad_q"),
        scale_dK=description.scalar("scale_grad_k"),
        scale_dV=description.scalar("scale_grad_v"),
        scale_dP=description.scalar("scale_dp"),
        use_deterministic_algorithm=call.deterministic,
        **fp8_options(tensors),
    )
    tensors.dense("grad_q", call.heads, call.head_dim_qk, True, grads[0], grad_code)
    tensors.dense("grad_k", call.groups, call.head_dim_qk, False, grads[1], grad_code)
    tensors.dense("grad_v", call.groups, call.head_dim_v, False, grads[2], grad_code)
    for role, amax in zip(
        ("amax_grad_q", "amax_grad_k", "amax_grad_v", "amax_dp"), grads[3:7], strict=True
    ):
        description.output(role, amax, (1, 1, 1, 1))
    return description


_PLANS: Memory[tuple[Any, ...], CudnnPlan] = Memory(lambda key: planned(*key), MOST_PLANS)


def _common(
    call: AttentionCall, codes: Sequence[Tensor], inputs: AttentionInputs
) -> dict[str, int]:
    """Addresses of the tensors that both passes read."""
    q, k, v = codes
    pointers = {"q": q.data_ptr(), "k": k.data_ptr(), "v": v.data_ptr()}
    if call.mask.padding:
        assert inputs.lengths_q is not None and inputs.lengths_kv is not None
        pointers["lengths_q"] = inputs.lengths_q.data_ptr()
        pointers["lengths_kv"] = inputs.lengths_kv.data_ptr()
    return pointers


def forward(
    call: AttentionCall,
    codes: Sequence[Tensor],
    inputs: AttentionInputs,
    scalars: Mapping[str, int],
    output_code: torch.dtype,
) -> CudnnFP8Output:
    """Compute FP8 attention from codes of q, k and v.

    Args:
        scalars: Device addresses of float32 numbers: descale_q, descale_k, descale_v, descale_s,
            scale_s and scale_output.
    """
    q, k, v = codes
    device = q.device
    plan = _PLANS[
        describe_forward,
        device.index,
        call,
        Strided(q.stride(), k.stride(), v.stride()),
        q.dtype,
        output_code,
    ]
    output = torch.empty((*q.shape[:-1], call.head_dim_v), dtype=output_code, device=device)
    amax = torch.empty(2, dtype=torch.float32, device=device)
    pointers = _common(call, codes, inputs)
    pointers.update(scalars)
    pointers["output"] = output.data_ptr()
    pointers["amax_output"] = amax.data_ptr()
    pointers["amax_s"] = pointers["amax_output"] + amax.element_size()
    lse = None
    if call.needs_gradient:
        lse = torch.empty(
            (call.batch, call.heads, call.seqlen_q), dtype=torch.float32, device=device
        )
        pointers["stats"] = lse.data_ptr()
    plan.run(pointers, device)
    return CudnnFP8Output(output, lse, amax)


def backward(
    call: AttentionCall,
    codes: Sequence[Tensor],
    output: Tensor,
    grad_output: Tensor,
    lse: Tensor,
    inputs: AttentionInputs,
    scalars: Mapping[str, int],
    grad_code: torch.dtype,
) -> CudnnFP8Gradients:
    """Compute the FP8 gradients of q, k and v from their codes and the codes of the output and its gradient.

    Args:
        scalars: As in the forward pass, and descale_output, descale_grad_output, descale_dp, scale_dp, scale_grad_q,
            scale_grad_k and scale_grad_v.
    """
    q, k, v = codes
    device = q.device
    strided = Strided(q.stride(), k.stride(), v.stride())._replace(grad_output=grad_output.stride())
    dtypes = (q.dtype, output.dtype, grad_output.dtype, grad_code)
    plan = _PLANS[(describe_backward, device.index, call, strided, *dtypes)]
    grads = [torch.empty(x.shape, dtype=grad_code, device=device) for x in codes]
    amax = torch.empty(4, dtype=torch.float32, device=device)
    pointers = _common(call, codes, inputs)
    pointers.update(scalars)
    for index, (role, grad) in enumerate(zip(("grad_q", "grad_k", "grad_v"), grads, strict=True)):
        pointers[role] = grad.data_ptr()
        pointers[f"amax_{role}"] = amax.data_ptr() + amax.element_size() * index
    pointers["amax_dp"] = amax.data_ptr() + amax.element_size() * 3
    pointers["output"] = output.data_ptr()
    pointers["grad_output"] = grad_output.data_ptr()
    pointers["stats"] = lse.data_ptr()
    plan.run(pointers, device)
    return CudnnFP8Gradients(*grads, amax)  # pyright: ignore[reportCallIssue]
