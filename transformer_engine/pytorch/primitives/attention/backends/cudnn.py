"""o, lse = attention(q, k, v) and its gradients by cuDNN's fused kernels, through nvidia-cudnn-frontend.

A graph is planned at the first call of a kind (tens of milliseconds and a kernel's compilation) and then kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .....common.dispatch import Backend, Refusal
from .....common.memory import Memory
from ....runtime.device import get_cudnn_version, has_cuda
from ..dropout import random_state
from ..packed import zero_behind
from ..passes import Passes
from ..request import Attended, AttentionInputs, AttentionRequest, Feature, Gradients
from .cudnn_graph import MOST_PLANS, Plan, Strides, contiguous_strides, missing, planned, ragged_offsets
from .cudnn_plan import (
    Strided,
    bottom_right,
    bucketed_tokens,
    describe_backward,
    describe_forward,
    format_shape,
    has_dense_bias,
    has_sink_gradient,
)

# The deterministic backward keeps a float32 gradient of q for every block of keys.
DETERMINISTIC_WORKSPACE = 8 << 30
# score_mod: the library takes none with the masks that belong to it.
TAKES = frozenset(Feature) - {
    Feature.EMPTY,
    Feature.FP8,
    Feature.FULL_DROPOUT,
    Feature.SCORE_MOD,
    Feature.ARBITRARY,
    Feature.PADDING_TENSORS,
}
_KEYS_OF_A_BLOCK = 128


def refuses(r: AttentionRequest) -> str | None:
    """Why cuDNN does not take a request; None when it does."""
    for rule in (_refuses_place, _refuses_shape, _refuses_mask, _refuses_options, _refuses_backward):
        refusal = rule(r)
        if refusal is not None:
            return refusal
    return None


def bind(request: AttentionRequest) -> Passes | Refusal:
    """The two passes, planned for contiguous tensors; the library may refuse that."""
    reason = _refused_by_planning(request) if has_cuda() else None
    return PASSES if reason is None else Refusal(reason)


def _refuses_place(r: AttentionRequest) -> str | None:
    if not r.device.switches.fused or r.device.switches.fused_kind == "2":
        return (
            "NVTE_FUSED_ATTN=0" if not r.device.switches.fused else "NVTE_FUSED_ATTN_BACKEND=2 asks for FP8"
        )
    if r.device.type != "cuda":
        return f"it needs a CUDA device, the tensors are on {r.device.type}"
    if r.device.capability < (8, 0):
        return f"compute capability {r.device.capability[0]}.{r.device.capability[1]} < 8.0"
    if r.shape.dtype not in (torch.bfloat16, torch.float16):
        return f"{r.shape.dtype}; it takes torch.bfloat16 and torch.float16"
    return missing()


def _refuses_shape(r: AttentionRequest) -> str | None:
    for name, size in (("qk", r.shape.head_dim_qk), ("v", r.shape.head_dim_v)):
        if size % 8:
            return f"head_dim_{name}={size} is not a multiple of 8"
    if r.options.needs_gradient:
        largest = max(r.shape.head_dim_qk, r.shape.head_dim_v)
        limit = 128 if r.device.capability < (9, 0) else 256
        if largest > limit:
            return f"head size {largest} > {limit} in the backward pass on compute capability {r.device.capability}"
        sizes = r.shape.head_dim_qk, r.shape.head_dim_v
        if largest > 128 and sizes[0] != sizes[1] and sizes != (192, 128):
            return f"head sizes {sizes[0]} and {sizes[1]}: above 128 it takes equal ones and 192/128"
    return None


def _refuses_mask(r: AttentionRequest) -> str | None:
    left, right = r.options.mask.window
    if left >= 0 and right != 0 and get_cudnn_version() == (9, 14, 0):
        return f"window_size={left, right}: cuDNN 9.14.0 computes two-sided windows wrongly; take another version"
    if bottom_right(r):
        if r.shape.seqlen_q > r.shape.seqlen_kv:
            return f"a bottom-right diagonal with seqlen_q={r.shape.seqlen_q} > seqlen_kv={r.shape.seqlen_kv}"
        if r.options.bias != "no_bias" or r.options.dropout > 0.0:
            return "a bottom-right diagonal with bias, ALiBi or dropout"
    elif left >= 0 and not r.options.mask.padding and r.shape.seqlen_q - left > r.shape.seqlen_kv:
        return f"window_size={r.options.mask.window} leaves queries without a key"
    if left >= 0 and (r.options.dropout > 0.0 or r.options.bias == "alibi"):
        return f"window_size={r.options.mask.window} with ALiBi or dropout"
    return None


def _refuses_options(r: AttentionRequest) -> str | None:
    if has_dense_bias(r):
        assert r.shape.bias_shape is not None
        if r.shape.bias_shape[2:] != (r.shape.seqlen_q, r.shape.seqlen_kv):
            return f"a bias {list(r.shape.bias_shape)} that is broadcast over queries or keys"
        if "thd" in (r.shape.q_format, r.shape.kv_format):
            return "a bias with packed sequences"
    if r.options.bias == "alibi":
        if r.options.slopes_given or r.shape.heads & (r.shape.heads - 1):
            return "ALiBi slopes other than the usual ones of a power of two heads"
        if r.options.mask.name not in ("causal", "padding_causal") or r.shape.seqlen_q != r.shape.seqlen_kv:
            return (
                f"ALiBi with attn_mask_type={r.options.mask.name!r}; it takes causal masks over equal lengths"
            )
        if r.options.mask.padding and not r.options.same_lengths:
            return "ALiBi with sequences of unequal lengths"
    if r.options.max_logit and (r.options.softmax != "vanilla" or r.shape.q_format == "thd"):
        return "return_max_logit with a sink or packed sequences"
    if _may_lack_keys(r) and r.options.softmax != "vanilla":
        return "a sink, where a sequence of queries may have no keys"
    if r.shape.page_size and (r.shape.page_size & (r.shape.page_size - 1) or r.options.needs_gradient):
        return f"page_size={r.shape.page_size}: it takes powers of two, and no gradient"
    return None


def _may_lack_keys(r: AttentionRequest) -> bool:
    """May a sequence have queries but no keys? The library divides 0 by 0 there."""
    return r.options.mask.padding and not (r.options.same_lengths or r.options.cached)


def _refuses_backward(r: AttentionRequest) -> str | None:
    if not r.options.needs_gradient:
        return None
    packed = "thd" in (r.shape.q_format, r.shape.kv_format)
    if packed and r.options.softmax != "vanilla":
        if get_cudnn_version() < (9, 26, 0):
            return "a sink with packed sequences: before cuDNN 9.26 its backward reads out of bounds"
        if r.device.deterministic:
            return "deterministic gradients of a sink with packed sequences"
    if r.device.deterministic:
        if r.device.capability < (9, 0) and packed:
            return "deterministic gradients of packed sequences before compute capability 9.0"
        blocks = -(-r.shape.seqlen_kv // _KEYS_OF_A_BLOCK)
        space = blocks * r.shape.batch * r.shape.heads * r.shape.seqlen_q * r.shape.head_dim_qk * 4
        if space > DETERMINISTIC_WORKSPACE:
            return f"deterministic gradients would take {space >> 20} MiB of workspace"
    return None


def _refused_by_planning(r: AttentionRequest) -> str | None:
    """What the library itself says to contiguous tensors of this kind."""
    device = torch.cuda.current_device()
    q = _format_strides(r, True, r.shape.heads, r.shape.head_dim_qk)
    k = _format_strides(r, False, r.shape.groups, r.shape.head_dim_qk)
    v = _format_strides(r, False, r.shape.groups, r.shape.head_dim_v)
    grad_output = _format_strides(r, True, r.shape.heads, r.shape.head_dim_v)
    bias = contiguous_strides(r.shape.bias_shape) if has_dense_bias(r) and r.shape.bias_shape else None
    if r.shape.page_size:
        columns = -(-r.shape.seqlen_kv // r.shape.page_size)
        k = contiguous_strides((1, r.shape.page_size, r.shape.groups, r.shape.head_dim_qk))
        v = contiguous_strides((1, r.shape.page_size, r.shape.groups, r.shape.head_dim_v))
        strided = Strided(q, k, v, pages=r.shape.batch * columns, columns=columns)
    else:
        tokens = (bucketed_tokens(r.shape.batch * size) for size in (r.shape.seqlen_q, r.shape.seqlen_kv))
        strided = Strided(q, k, v, None, bias, *tokens)
    try:
        _PLANS[describe_forward, r, strided, device]
        if r.options.needs_gradient:
            _PLANS[describe_backward, r, strided._replace(grad_output=grad_output), device]
    except RuntimeError as error:
        return str(error)
    return None


def _format_strides(r: AttentionRequest, of_queries: bool, heads: int, depth: int) -> Strides:
    tensor_format = r.shape.q_format if of_queries else r.shape.kv_format
    size = r.shape.seqlen_q if of_queries else r.shape.seqlen_kv
    return contiguous_strides(format_shape(tensor_format, r.shape.batch, size, heads, depth, 1))


def _planned(key: tuple[Any, AttentionRequest, Strided, int]) -> Plan:
    describe, request, strided, device = key
    return planned(describe, device, request, strided)


_PLANS: Memory[tuple[Any, AttentionRequest, Strided, int], Plan] = Memory(_planned, MOST_PLANS)


class _Addressable(NamedTuple):
    """q, k, v and the bias as the library can read them, and their strides."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    strided: Strided


def _addressable(r: AttentionRequest, inputs: AttentionInputs) -> _Addressable:
    """The inputs; copies only of what is not aligned to 16 bytes."""
    q, k, v = aligned(inputs.q), aligned(inputs.k), aligned(inputs.v)
    bias = None
    if has_dense_bias(r):
        assert inputs.bias is not None
        bias = inputs.bias.detach()
        if r.options.bias == "pre_scale_bias":
            bias = bias * r.options.scale
        bias = bias.to(r.shape.dtype).contiguous()
    pages = columns = 0
    if r.shape.page_size:
        assert inputs.page_table is not None
        pages, columns = k.shape[0], inputs.page_table.shape[1]
    strided = Strided(
        q.stride(),
        k.stride(),
        v.stride(),
        None,
        None if bias is None else bias.stride(),
        bucketed_tokens(q.shape[0]) if r.shape.q_format == "thd" else 0,
        bucketed_tokens(k.shape[0]) if r.shape.kv_format == "thd" else 0,
        pages,
        columns,
    )
    return _Addressable(q, k, v, bias, strided)


def aligned(x: Tensor) -> Tensor:
    """x, or a contiguous copy where an address or a stride is not a multiple of 16 bytes."""
    unit = 16 // x.element_size()
    if x.data_ptr() % 16 == 0 and x.stride(-1) == 1:
        for stride in x.stride()[:-1]:
            if stride % unit or stride == 0:
                break
        else:
            return x
    return x.clone(memory_format=torch.contiguous_format)


def _common(r: AttentionRequest, inputs: AttentionInputs, given: _Addressable) -> dict[str, int]:
    """Addresses of what both passes read."""
    pointers = {"q": given.q.data_ptr(), "k": given.k.data_ptr(), "v": given.v.data_ptr()}
    if given.bias is not None:
        pointers["bias"] = given.bias.data_ptr()
    if r.options.mask.padding:
        assert inputs.lengths_q is not None and inputs.lengths_kv is not None
        pointers["lengths_q"] = inputs.lengths_q.data_ptr()
        pointers["lengths_kv"] = inputs.lengths_kv.data_ptr()
    if inputs.sink is not None:
        pointers["sink"] = inputs.sink.data_ptr()
    return pointers


def _fresh(r: AttentionRequest, like: Tensor, depth: int, starts: Tensor | None) -> Tensor:
    """A tensor [.., heads, depth] to be written, where tokens that belong to no sequence are zero already.

    starts   of packed sequences
    """
    shape = (*like.shape[:-1], depth)
    if starts is None or not r.options.padded_between:
        x = torch.empty(shape, dtype=r.shape.dtype, device=like.device)
        if starts is not None:
            zero_behind(x, starts)
        return x
    return torch.zeros(shape, dtype=r.shape.dtype, device=like.device)


def _without_keys(r: AttentionRequest, output: Tensor, lse: Tensor | None, inputs: AttentionInputs) -> None:
    """Where a sequence has no keys, make the output 0 and the logarithm -inf, in place."""
    assert inputs.lengths_kv is not None
    none = inputs.lengths_kv == 0
    if r.shape.q_format == "thd":
        assert inputs.starts_q is not None
        token = torch.arange(output.shape[0], dtype=torch.int32, device=output.device)
        sequence = torch.searchsorted(inputs.starts_q, token, right=True) - 1
        none = none[sequence.clamp_(max=r.shape.batch - 1)]
        rows, statistics = none[:, None, None], none[:, None]
    else:
        rows = none[None, :, None, None] if r.shape.q_format == "sbhd" else none[:, None, None, None]
        statistics = none[:, None, None]
    output.masked_fill_(rows, 0.0)
    if lse is not None:
        lse.masked_fill_(statistics, -torch.inf)


def forward(request: AttentionRequest, inputs: AttentionInputs) -> Attended:
    """o = softmax(scale * q k^T + bias) v with the logarithm of the softmax's denominator."""
    r = request
    given = _addressable(r, inputs)
    device = given.q.device
    plan = _PLANS[describe_forward, r, given.strided, device.index]
    packed = r.shape.q_format == "thd"
    output = _fresh(r, given.q, r.shape.head_dim_v, inputs.starts_q if packed else None)
    pointers = _common(r, inputs, given)
    pointers["output"] = output.data_ptr()
    rng_state = lse = score_sum = None
    rows = (given.q.shape[0], r.shape.heads) if packed else (r.shape.batch, r.shape.heads, r.shape.seqlen_q)
    if r.options.needs_gradient or r.options.max_logit:
        lse = torch.empty(rows, dtype=torch.float32, device=device)
        pointers["stats"] = pointers["score_max"] = lse.data_ptr()
    if r.options.max_logit:
        score_sum = torch.empty(rows, dtype=torch.float32, device=device)
        pointers["score_sum"] = score_sum.data_ptr()
    if r.options.dropout > 0.0:
        rng_state = random_state(device)
        pointers["seed"] = rng_state.data_ptr()
        pointers["offset"] = pointers["seed"] + rng_state.element_size()
    if r.shape.page_size:
        assert inputs.page_table is not None
        pointers["page_table"] = pointers["page_table_v"] = inputs.page_table.data_ptr()
    offsets, alive = ragged_offsets(plan, inputs.starts_q, inputs.starts_kv)
    plan.run(pointers, device, offsets)
    del alive
    if _may_lack_keys(r):
        _without_keys(r, output, lse, inputs)
    max_logit = None
    if score_sum is not None and lse is not None:
        max_logit = lse.amax(dim=(0, 2))
        lse = lse + score_sum.log_()
    return Attended(output, lse.t() if packed and lse is not None else lse, rng_state, max_logit)


def backward(
    request: AttentionRequest, inputs: AttentionInputs, attended: Attended, grad_output: Tensor
) -> Gradients:
    """The gradients of q, k, v, and of the bias and the sink where they are wanted."""
    r = request
    if r.shape.q_format == "thd" and not inputs.q.is_contiguous():
        # The library writes a ragged grad_q with the strides of q.
        inputs = inputs._replace(q=inputs.q.contiguous())
    given = _addressable(r, inputs)
    device = given.q.device
    grad_output = aligned(grad_output)
    assert attended.lse is not None
    stats = (attended.lse.t() if r.shape.q_format == "thd" else attended.lse).contiguous()
    output = attended.output.contiguous()
    plan = _PLANS[
        describe_backward, r, given.strided._replace(grad_output=grad_output.stride()), device.index
    ]
    starts_kv = inputs.starts_kv if r.shape.kv_format == "thd" else None
    grad_q = _fresh(r, given.q, r.shape.head_dim_qk, inputs.starts_q if r.shape.q_format == "thd" else None)
    grad_k = _fresh(r, given.k, r.shape.head_dim_qk, starts_kv)
    grad_v = _fresh(r, given.v, r.shape.head_dim_v, starts_kv)
    pointers = _common(r, inputs, given)
    pointers.update(
        output=output.data_ptr(),
        grad_output=grad_output.data_ptr(),
        stats=stats.data_ptr(),
        grad_q=grad_q.data_ptr(),
        grad_k=grad_k.data_ptr(),
        grad_v=grad_v.data_ptr(),
    )
    if attended.rng_state is not None:
        pointers["seed"] = attended.rng_state.data_ptr()
        pointers["offset"] = pointers["seed"] + attended.rng_state.element_size()
    grad_bias = grad_sink = None
    if given.bias is not None:
        grad_bias = torch.zeros(given.bias.shape, dtype=r.shape.dtype, device=device)
        pointers["grad_bias"] = grad_bias.data_ptr()
    if has_sink_gradient(r):
        grad_sink = torch.zeros(r.shape.heads, dtype=torch.float32, device=device)
        pointers["grad_sink"] = grad_sink.data_ptr()
    offsets, alive = ragged_offsets(plan, inputs.starts_q, inputs.starts_kv)
    plan.run(pointers, device, offsets)
    del alive
    if r.options.softmax == "learnable" and grad_sink is None:
        grad_sink = _grad_sink(r, inputs, output, grad_output, stats)
    if not r.options.bias_gradient:
        grad_bias = None
    elif grad_bias is not None and inputs.bias is not None:
        if r.options.bias == "pre_scale_bias":
            grad_bias = grad_bias * r.options.scale
        grad_bias = grad_bias.to(inputs.bias.dtype)
    return Gradients(grad_q, grad_k, grad_v, grad_bias, grad_sink)


def _grad_sink(
    r: AttentionRequest, inputs: AttentionInputs, output: Tensor, grad_output: Tensor, lse: Tensor
) -> Tensor:
    """dsink [h] = -sum exp(sink - lse) sum_d(do o), in a fixed order."""
    assert inputs.sink is not None
    inner = (grad_output.float() * output.float()).sum(dim=-1)
    inner = inner.permute(1, 2, 0) if r.shape.q_format == "sbhd" else inner.transpose(1, 2)
    share = torch.exp(inputs.sink[None, :, None] - lse)
    # Rows of no token have no logarithm, and no output.
    return -torch.where(inner == 0.0, 0.0, share * inner).sum(dim=(0, 2))


PASSES = Passes("cudnn", forward, backward)
BACKEND = Backend("cudnn", takes=TAKES, refuses=refuses, bind=bind, opaque=True)
