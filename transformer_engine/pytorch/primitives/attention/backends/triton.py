"""This project's Triton kernels: every mask, bias, softmax and layout.

No s_q x s_kv matrix is allocated. Tensors are read by their strides, packed sequences in place,
cached keys through their page table. Both passes are bitwise repeatable. A few queries to many keys
are computed by `triton_decode`.
"""

from __future__ import annotations

import functools
from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .....common.dispatch import Backend
from .....common.kernels.launch import LARGEST_GRID, unavailable_reason
from ....runtime.launching import DTYPE_NAMES, perform, processors, run_program_into
from ..call import Attended, AttentionCall, AttentionInputs, Feature, Gradients
from ..dropout import random_state
from ..passes import Passes
from . import triton_decode
from .triton_layout import (
    Strides,
    as_bytes,
    contiguous_triple,
    lse_triple,
    problem,
    strides,
    triple,
)

if TYPE_CHECKING:
    from .....common.kernels.launch import Launch
    from .....common.kernels.program import Program

# score_mod is a Python function; the kernels are fixed.
TAKES = frozenset(Feature) - {Feature.EMPTY, Feature.FP8, Feature.SCORE_MOD, Feature.FULL_DROPOUT}
LARGEST_HEAD = 256
LARGEST_HEAD_WITHOUT_GRADIENT = 576


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return the reason why the call is unsupported; None if it is supported."""
    if not (call.switches.flash or call.switches.fused):
        return "NVTE_FLASH_ATTN=0 and NVTE_FUSED_ATTN=0"
    if call.device_type != "cuda":
        return f"it needs a CUDA device, the tensors are on {call.device_type}"
    if (
        reason := unavailable_reason(call.hardware) or call.hardware.lacks("triton kernels")
    ) is not None:
        return reason
    if call.dtype not in DTYPE_NAMES:
        return f"the tensors are {call.dtype}; supported: float32, float16 and bfloat16"
    limit = LARGEST_HEAD if call.needs_gradient else LARGEST_HEAD_WITHOUT_GRADIENT
    if max(call.head_dim_qk, call.head_dim_v) > limit:
        kind = "with" if call.needs_gradient else "without"
        return f"head size {max(call.head_dim_qk, call.head_dim_v)} > {limit} {kind} gradients"
    if call.page_size and call.needs_gradient:
        return "a paged cache has no gradient"
    programs = {"sequences": call.batch}
    if call.bias_shape and call.bias_gradient:
        programs["planes [s_q, s_kv] of a bias with a gradient"] = prod(call.bias_shape[:2])
    what, count = max(programs.items(), key=itemgetter(1))
    if count > LARGEST_GRID[2]:
        return f"{count} {what} > {LARGEST_GRID[2]}, the most programs that CUDA starts there"
    return None


class _Sources(NamedTuple):
    """The first inputs of every kernel; masks as bytes."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths_q: Tensor | None
    lengths_kv: Tensor | None
    starts_q: Tensor | None
    starts_kv: Tensor | None
    masked_q: Tensor | None
    masked_kv: Tensor | None
    masked: Tensor | None
    bias: Tensor | None
    slopes: Tensor | None


def forward(call: AttentionCall, inputs: AttentionInputs) -> Attended:
    """Compute the output and lse of a call, and the random state and largest logits if needed."""
    if triton_decode.takes(call):
        return triton_decode.forward(call, inputs)
    sources, q = _sources(call, inputs), inputs.q
    launch = _forward_launch(call, strides(call, inputs), q.get_device())
    # packed: tokens outside the sequences are not visited
    make = torch.zeros if call.packed else torch.empty
    out = make((*q.shape[:-1], call.head_dim_v), dtype=q.dtype, device=q.device)
    lse = None
    if call.needs_gradient and call.packed:
        # lse [h, t] is a [t, h] view, so that its strides do not change with t.
        lse = torch.full(
            (q.shape[0], call.heads), -torch.inf, dtype=torch.float32, device=q.device
        ).t()
    elif call.needs_gradient:
        lse = q.new_empty((call.batch, call.heads, call.seqlen_q), dtype=torch.float32)
    rng_state = random_state(q.device) if call.dropout > 0.0 else None
    tops = None
    if call.max_logit:
        tops = q.new_empty((call.batch, call.heads, launch.grid[0]), dtype=torch.float32)
    tensors = (*sources, inputs.sink, rng_state, inputs.page_table, out, lse, tops)
    run_program_into(launch, tensors, q.device)
    return Attended(out, lse, rng_state, None if tops is None else tops.amax(dim=(0, 2)))


def backward(
    call: AttentionCall, inputs: AttentionInputs, attended: Attended, grad_output: Tensor
) -> Gradients:
    """Compute the gradients of a call from the gradient [.., h, d_v] of its output."""
    assert attended.lse is not None
    sources, q, lse = _sources(call, inputs), inputs.q, attended.lse
    plan = _backward_plan(
        call,
        strides(call, inputs),
        grad_output.stride(),
        attended.output.stride(),
        lse.stride(),
        inputs.sink is not None,
        q.get_device(),
    )
    outputs = _allocate_gradients(call, inputs, plan, lse)
    operands = (*sources, attended.rng_state, attended.output, grad_output, lse, inputs.sink)
    perform(plan.program, (*operands, *(tensor for tensor in outputs if tensor is not None)))
    # Partial sums are added in a fixed order.
    _, sink, dq, dk, dv, bias = outputs
    if dk.dim() > inputs.k.dim():
        dk = dk.sum(dim=-2, dtype=torch.float32).to(inputs.k.dtype)
        dv = dv.sum(dim=-2, dtype=torch.float32).to(inputs.v.dtype)
    if bias is not None and inputs.bias is not None and bias.shape != inputs.bias.shape:
        bias = bias.sum_to_size(inputs.bias.shape).to(inputs.bias.dtype)
    if sink is not None and inputs.sink is not None:
        sink = sink.sum(dim=(0, 2)).to(inputs.sink.dtype)
    return Gradients(dq, dk, dv, bias, sink)


class _BackwardPlan(NamedTuple):
    """The launches of a backward pass.

    Attributes:
        parts: Programs that share the query heads of a group while they iterate over keys.
        sink_parts: Partial sums per head of the gradient of a sink.
        bias_shape: Shape of the bias gradient or its partial sums; () without a gradient.
    """

    program: Program
    parts: int
    sink_parts: int
    bias_shape: tuple[int, ...]


class _Results(NamedTuple):
    """Launch results, in order."""

    delta: Tensor
    sink: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None


def _allocate_gradients(
    call: AttentionCall, inputs: AttentionInputs, plan: _BackwardPlan, lse: Tensor
) -> _Results:
    """Allocate the gradients and their partial sums; zeros if some tokens belong to no sequence."""
    q = inputs.q
    make = torch.zeros if call.packed else torch.empty
    sink = bias = None
    if inputs.sink is not None:
        sink = q.new_empty((call.batch, call.heads, plan.sink_parts), dtype=torch.float32)
    if plan.bias_shape:
        assert inputs.bias is not None
        same_shape = plan.bias_shape == inputs.bias.shape
        bias = q.new_empty(
            plan.bias_shape, dtype=inputs.bias.dtype if same_shape else torch.float32
        )
    make_keys = torch.zeros if call.kv_format == "thd" else torch.empty

    def choose_keys(tensor: Tensor) -> Tensor:
        if plan.parts == 1:
            return make_keys(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        parts = (*tensor.shape[:-1], plan.parts, tensor.shape[-1])
        return make_keys(parts, dtype=torch.float32, device=tensor.device)

    dq = make(q.shape, dtype=q.dtype, device=q.device)
    return _Results(
        torch.empty_like(lse), sink, dq, choose_keys(inputs.k), choose_keys(inputs.v), bias
    )


def _sources(call: AttentionCall, inputs: AttentionInputs) -> _Sources:
    return _Sources(
        *inputs[:7],
        as_bytes(inputs.masked_q, flat=True),
        as_bytes(inputs.masked_kv, flat=True),
        as_bytes(inputs.masked, flat=False),
        inputs.bias,
        inputs.slopes,
    )


@functools.lru_cache(maxsize=1024)
def _forward_launch(call: AttentionCall, strides: Strides, device: int) -> Launch:
    from .....common.kernels import attention

    out = contiguous_triple(call.q_format, call.batch, call.seqlen_q, call.heads, call.head_dim_v)
    lse = lse_triple(call, None)
    return attention.forward(
        problem(call, strides, out, lse, processors(device).shared_memory),
        call.max_logit,
        call.needs_gradient,
        call.packed,
    )


@functools.lru_cache(maxsize=1024)
def _backward_plan(
    call: AttentionCall,
    strides: Strides,
    grad_output: tuple[int, ...],
    output: tuple[int, ...],
    lse: tuple[int, ...],
    has_sink: bool,
    device: int,
) -> _BackwardPlan:
    from .....common.kernels import attention_backward as kernels
    from .....common.kernels import attention_bias, attention_delta, attention_programs

    count, shared_memory = processors(device)
    given_out, given_grad = triple(call.q_format, output), triple(call.q_format, grad_output)
    p = problem(call, strides, given_grad, lse_triple(call, lse), shared_memory)
    dq = contiguous_triple(call.q_format, call.batch, call.seqlen_q, call.heads, call.head_dim_qk)
    parts = p.key_parts(kernels.keys_tile(p)[1], count)

    def grad_strides(size: int) -> tuple[int, int, int, int]:
        batch, token, head = contiguous_triple(
            call.kv_format, call.batch, call.seqlen_kv, call.groups, parts * size
        )
        return size, batch, token, head

    packed = call.kv_format == "thd"
    keys = kernels.keys(
        p, grad_strides(call.head_dim_qk), grad_strides(call.head_dim_v), parts, packed
    )
    bias, bias_shape = None, ()
    if call.bias_gradient and call.bias in ("pre_scale_bias", "post_scale_bias"):
        assert call.bias_shape is not None
        bias, bias_shape = attention_bias.added(p, call.bias_shape)
    delta = attention_delta.delta(p, given_out, has_sink)
    queries = kernels.queries(p, dq, call.packed)
    program = attention_programs.gradients(delta, queries, keys, bias)
    return _BackwardPlan(program, parts, delta.grid[0], bias_shape)


PASSES = Passes("triton", forward, backward)
BACKEND = Backend(
    "triton",
    takes=TAKES,
    unsupported_reason=unsupported_reason,
    bind=lambda call: PASSES,
    opaque=True,
)
