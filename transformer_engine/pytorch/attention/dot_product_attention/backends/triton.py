"""o = softmax(scale * q k^T + bias) v by kernels of our own: every mask, bias, softmax and layout.

Nothing of size s_q x s_kv is ever made. Tensors are read by their strides, packed sequences where they lie, cached
keys through their page table. Both passes give the same bits from run to run. A few queries to many keys go to
`triton_decode`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .....common.dispatch import Backend
from .....common.formats import ceil_div
from .....common.kernels.launch import missing
from ....primitives.launching import DTYPE_NAMES, processors, run_into
from ..autograd import Kernels, attend
from ..dropout import random_state
from ..request import Attended, AttentionInputs, AttentionRequest, Gradients
from . import triton_decode
from .triton_layout import Strides, as_bytes, contiguous_triple, lse_triple, problem, strides, triple

if TYPE_CHECKING:
    from .....common.kernels.launch import Launch

LARGEST_HEAD = 256
LARGEST_HEAD_WITHOUT_GRADIENT = 576


def refuses(r: AttentionRequest) -> str | None:
    """Why this backend cannot take the request; None if it can."""
    if not (r.switches.flash or r.switches.fused):
        return "NVTE_FLASH_ATTN=0 and NVTE_FUSED_ATTN=0"
    if r.fp8 is not None:
        return f"fp8={r.fp8!r}; it computes in the tensors' own dtype"
    if r.score_mod is not None:
        return "score_mod is a function of Python; its kernels are fixed"
    if r.device_type != "cuda":
        return f"it needs a CUDA device, the tensors are on {r.device_type}"
    if (reason := missing()) is not None:
        return reason
    if r.capability < (8, 0):
        return f"compute capability {r.capability[0]}.{r.capability[1]} < 8.0"
    if r.dtype not in DTYPE_NAMES:
        return f"the tensors are {r.dtype}; it takes float32, float16 and bfloat16"
    limit = LARGEST_HEAD if r.needs_gradient else LARGEST_HEAD_WITHOUT_GRADIENT
    if max(r.head_dim_qk, r.head_dim_v) > limit:
        kind = "with" if r.needs_gradient else "without"
        return f"head size {max(r.head_dim_qk, r.head_dim_v)} > {limit} {kind} gradients"
    if r.page_size and r.needs_gradient:
        return "a paged cache has no gradient"
    if r.empty:
        return "an empty tensor"
    return None


class _Sources(NamedTuple):
    """What every kernel reads first; masks as bytes."""

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


def forward(request: AttentionRequest, inputs: AttentionInputs) -> Attended:
    """Output, lse and, where asked for, random state and largest logits of a request."""
    if triton_decode.takes(request):
        return triton_decode.forward(request, inputs)
    sources, q = _sources(request, inputs), inputs.q
    launch = _forward_launch(request, strides(request, inputs), q.get_device())
    make = torch.zeros if request.packed else torch.empty  # packed: tokens of no sequence are not visited
    out = make((*q.shape[:-1], request.head_dim_v), dtype=q.dtype, device=q.device)
    lse = _empty_lse(request, q) if request.needs_gradient else None
    rng_state = random_state(q.device) if request.dropout > 0.0 else None
    tops = None
    if request.max_logit:
        tops = q.new_empty((request.batch, request.heads, launch.grid[0]), dtype=torch.float32)
    tensors = (*sources, inputs.sink, rng_state, inputs.page_table, out, lse, tops)
    run_into(launch, tensors, q.device)
    return Attended(out, lse, rng_state, None if tops is None else tops.amax(dim=(0, 2)))


def backward(
    request: AttentionRequest, inputs: AttentionInputs, attended: Attended, grad_output: Tensor
) -> Gradients:
    """Gradients of a request from the gradient [.., h, d_v] of its output."""
    if grad_output.stride(-1) != 1:
        grad_output = grad_output.contiguous()
    assert attended.lse is not None
    sources, q, lse = _sources(request, inputs), inputs.q, attended.lse
    plan = _backward_plan(
        request,
        strides(request, inputs),
        grad_output.stride(),
        attended.output.stride(),
        lse.stride(),
        inputs.sink is not None,
        q.get_device(),
    )
    delta = torch.empty_like(lse)
    grad_sink = None
    if inputs.sink is not None:
        grad_sink = q.new_empty((request.batch, request.heads, plan.delta.grid[0]), dtype=torch.float32)
    few = (sources.lengths_q, sources.starts_q, sources.masked_q)
    tensors = (attended.output, grad_output, lse, inputs.sink, *few, delta, grad_sink)
    run_into(plan.delta, tensors, q.device)
    context = (*sources, attended.rng_state, grad_output, lse, delta)
    make = torch.zeros if request.packed else torch.empty
    dq = make(q.shape, dtype=q.dtype, device=q.device)
    run_into(plan.queries, (*context, dq), q.device)
    dk, dv = _grad_keys(request, inputs, plan, context)
    grad_bias = None
    if plan.bias is not None:
        assert inputs.bias is not None
        bias = inputs.bias
        summed = plan.bias_shape != bias.shape
        grad_bias = bias.new_empty(plan.bias_shape, dtype=torch.float32 if summed else bias.dtype)
        run_into(plan.bias, (*context, grad_bias), q.device)
        grad_bias = grad_bias.sum_to_size(bias.shape).to(bias.dtype) if summed else grad_bias
    if grad_sink is not None:
        assert inputs.sink is not None
        grad_sink = grad_sink.sum(dim=(0, 2)).to(inputs.sink.dtype)
    return Gradients(dq, dk, dv, grad_bias, grad_sink)


class _BackwardPlan(NamedTuple):
    """The launches of a backward, in order; parts: programs that share a group's query heads in `keys`."""

    delta: Launch
    queries: Launch
    keys: Launch
    parts: int
    bias: Launch | None
    bias_shape: tuple[int, ...]


def _grad_keys(
    request: AttentionRequest,
    inputs: AttentionInputs,
    plan: _BackwardPlan,
    context: tuple[Tensor | None, ...],
) -> tuple[Tensor, Tensor]:
    """dk, dv; where several programs share a group, the sums of their parts, in order."""
    k, v = inputs.k, inputs.v
    make = torch.zeros if request.kv_format == "thd" else torch.empty
    if plan.parts == 1:
        dk = make(k.shape, dtype=k.dtype, device=k.device)
        dv = make(v.shape, dtype=v.dtype, device=v.device)
        run_into(plan.keys, (*context, dk, dv), k.device)
        return dk, dv
    dk = make((*k.shape[:-1], plan.parts, k.shape[-1]), dtype=torch.float32, device=k.device)
    dv = make((*v.shape[:-1], plan.parts, v.shape[-1]), dtype=torch.float32, device=v.device)
    run_into(plan.keys, (*context, dk, dv), k.device)
    return dk.sum(dim=-2, dtype=torch.float32).to(k.dtype), dv.sum(dim=-2, dtype=torch.float32).to(v.dtype)


def _sources(request: AttentionRequest, inputs: AttentionInputs) -> _Sources:
    return _Sources(
        *inputs[:7],
        as_bytes(inputs.masked_q, flat=True),
        as_bytes(inputs.masked_kv, flat=True),
        as_bytes(inputs.masked, flat=False),
        inputs.bias,
        inputs.slopes,
    )


def _empty_lse(request: AttentionRequest, q: Tensor) -> Tensor:
    """[b, h, s_q]; thd [h, t], a view of [t, h] so that its strides do not change with t."""
    if request.packed:
        return torch.full((q.shape[0], request.heads), -torch.inf, dtype=torch.float32, device=q.device).t()
    return q.new_empty((request.batch, request.heads, request.seqlen_q), dtype=torch.float32)


@functools.lru_cache(maxsize=1024)
def _forward_launch(request: AttentionRequest, given: Strides, device: int) -> Launch:
    from .....common.kernels import attention  # it imports triton

    out = contiguous_triple(
        request.q_format, request.batch, request.seqlen_q, request.heads, request.head_dim_v
    )
    lse = lse_triple(request, None)
    return attention.forward(
        problem(request, given, out, lse, processors(device).shared_memory),
        request.max_logit,
        request.needs_gradient,
        request.packed,
    )


@functools.lru_cache(maxsize=1024)
def _backward_plan(
    request: AttentionRequest,
    given: Strides,
    grad_output: tuple[int, ...],
    output: tuple[int, ...],
    lse: tuple[int, ...],
    has_sink: bool,
    device: int,
) -> _BackwardPlan:
    from .....common.kernels import attention_backward as kernels
    from .....common.kernels import attention_bias

    r, (count, shared_memory) = request, processors(device)
    given_out, given_grad = triple(r.q_format, output), triple(r.q_format, grad_output)
    p = problem(r, given, given_grad, lse_triple(r, lse), shared_memory)
    dq = contiguous_triple(r.q_format, r.batch, r.seqlen_q, r.heads, r.head_dim_qk)
    group = r.heads // r.groups
    programs = ceil_div(r.seqlen_kv, kernels.keys_tile(p)[1]) * r.groups * r.batch
    parts = group if programs < 2 * count else 1

    def grad_strides(size: int) -> tuple[int, int, int, int]:
        batch, token, head = contiguous_triple(r.kv_format, r.batch, r.seqlen_kv, r.groups, parts * size)
        return size, batch, token, head

    packed = r.kv_format == "thd"
    keys = kernels.keys(p, grad_strides(r.head_dim_qk), grad_strides(r.head_dim_v), parts, packed)
    bias, bias_shape = None, ()
    if r.bias_gradient and r.bias in ("pre_scale_bias", "post_scale_bias"):
        assert r.bias_shape is not None
        bias, bias_shape = attention_bias.added(p, r.bias_shape)
    delta = kernels.delta(p, given_out, has_sink)
    queries = kernels.queries(p, dq, r.packed)
    return _BackwardPlan(delta, queries, keys, parts, bias, bias_shape)


KERNELS = Kernels("triton", forward, backward)
BACKEND = Backend("triton", functools.partial(attend, KERNELS), refuses)
