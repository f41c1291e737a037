"""o, lse = attention(q, k, v) and its gradients by cuDNN's fused kernels, through nvidia-cudnn-frontend.

A graph is planned at the first of equal calls (tens of milliseconds and a kernel's compilation) and cached.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .....common.dispatch import Backend, PlanFailure
from .....common.memory import Memory
from ....runtime.device import get_cudnn_version, has_cuda
from ..call import Attended, AttentionCall, AttentionInputs, Feature, Gradients
from ..dropout import random_state
from ..packed import zero_padding
from ..passes import Passes
from .cudnn_graph import (
    MOST_PLANS,
    CudnnPlan,
    Strides,
    contiguous_strides,
    make_ragged_offsets,
    planned,
    unavailable_reason,
)
from .cudnn_plan import (
    Strided,
    bottom_right,
    bucket_tokens,
    describe_backward,
    describe_forward,
    format_shape,
    has_dense_bias,
    has_sink_gradient,
)
from .cudnn_score_mod import bound_tensors, unsupported_score_mod
from .limits import unsupported_by_cudnn, unsupported_by_environment

# The deterministic backward keeps a float32 gradient of q for every key block.
DETERMINISTIC_WORKSPACE = 8 << 30
TAKES = frozenset(Feature) - {
    Feature.BATCH_INVARIANT,
    Feature.EMPTY,
    Feature.FP8,
    Feature.FULL_DROPOUT,
    Feature.ARBITRARY,
    Feature.PADDING_TENSORS,
}
_KEYS_OF_A_BLOCK = 128


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return the reason why the call is unsupported; None if it is supported."""
    for rule in (
        _unsupported_device,
        _unsupported_shape,
        _unsupported_mask,
        _unsupported_options,
        _unsupported_backward,
        unsupported_score_mod,
    ):
        reason = rule(call)
        if reason is not None:
            return reason
    return None


def bind(call: AttentionCall) -> Passes | PlanFailure:
    """Return the two passes, planned for contiguous tensors, or the reason why the library cannot plan them."""
    reason = _planning_failure(call) if has_cuda() else None
    return PASSES if reason is None else PlanFailure(reason)


def _unsupported_device(call: AttentionCall) -> str | None:
    if (reason := unsupported_by_environment(call, "cudnn attention", other_kind="2")) is not None:
        return reason
    if call.dtype not in (torch.bfloat16, torch.float16):
        return f"{call.dtype}; supported: torch.bfloat16 and torch.float16"
    return unavailable_reason() or unsupported_by_cudnn(call, get_cudnn_version())


def _unsupported_shape(call: AttentionCall) -> str | None:
    for name, size in (("qk", call.head_dim_qk), ("v", call.head_dim_v)):
        if size % 8:
            return f"head_dim_{name}={size} is not a multiple of 8"
    return None


def _unsupported_mask(call: AttentionCall) -> str | None:
    left, right = call.mask.window
    if left >= 0 and right != 0 and get_cudnn_version() == (9, 14, 0):
        return f"window_size={left, right}: cuDNN 9.14.0 computes two-sided windows wrongly; take another version"
    if bottom_right(call):
        if call.seqlen_q > call.seqlen_kv:
            return f"a bottom-right diagonal with seqlen_q={call.seqlen_q} > seqlen_kv={call.seqlen_kv}"
        if call.bias != "no_bias" or call.dropout > 0.0:
            return "a bottom-right diagonal with bias, ALiBi or dropout"
    elif left >= 0 and not call.mask.padding and call.seqlen_q - left > call.seqlen_kv:
        return f"window_size={call.mask.window} leaves queries without a key"
    if left >= 0 and (call.dropout > 0.0 or call.bias == "alibi"):
        return f"window_size={call.mask.window} with ALiBi or dropout"
    return None


def _unsupported_options(call: AttentionCall) -> str | None:
    if has_dense_bias(call):
        assert call.bias_shape is not None
        if call.bias_shape[2:] != (call.seqlen_q, call.seqlen_kv):
            return f"a bias {list(call.bias_shape)} that is broadcast over queries or keys"
        if "thd" in (call.q_format, call.kv_format):
            return "a bias with packed sequences"
    if call.bias == "alibi":
        if call.slopes_given or call.heads & (call.heads - 1):
            return "ALiBi slopes other than the usual ones of a power of two heads"
        if call.mask.name not in ("causal", "padding_causal") or call.seqlen_q != call.seqlen_kv:
            return f"ALiBi with attn_mask_type={call.mask.name!r}; supported: causal masks over equal lengths"
        if call.mask.padding and not call.same_lengths:
            return "ALiBi with sequences of unequal lengths"
    if call.max_logit and (call.softmax != "vanilla" or call.q_format == "thd"):
        return "return_max_logit with a sink or packed sequences"
    if (call.mask.padding and not (call.same_lengths or call.cached)) and call.softmax != "vanilla":
        return "a sink, where a sequence of queries may have no keys"
    if call.page_size and (call.page_size & (call.page_size - 1) or call.needs_gradient):
        return f"page_size={call.page_size}; supported: powers of two without gradients"
    return None


def _unsupported_backward(call: AttentionCall) -> str | None:
    if not call.needs_gradient:
        return None
    packed = "thd" in (call.q_format, call.kv_format)
    if packed and call.softmax != "vanilla":
        if get_cudnn_version() < (9, 26, 0):
            return (
                "a sink with packed sequences: before cuDNN 9.26 its backward reads out of bounds"
            )
        if call.deterministic:
            return "deterministic gradients of a sink with packed sequences"
    if call.deterministic:
        if (
            packed
            and (reason := call.hardware.lacks("cudnn deterministic packed attention")) is not None
        ):
            return f"deterministic gradients of packed sequences: {reason}"
        blocks = -(-call.seqlen_kv // _KEYS_OF_A_BLOCK)
        space = blocks * call.batch * call.heads * call.seqlen_q * call.head_dim_qk * 4
        if space > DETERMINISTIC_WORKSPACE:
            return f"deterministic gradients would take {space >> 20} MiB of workspace"
    return None


def _planning_failure(call: AttentionCall) -> str | None:
    """Return the reason why the library cannot plan contiguous tensors of this call; None if it can."""
    device = torch.cuda.current_device()
    q = _format_strides(call, True, call.heads, call.head_dim_qk)
    k = _format_strides(call, False, call.groups, call.head_dim_qk)
    v = _format_strides(call, False, call.groups, call.head_dim_v)
    grad_output = _format_strides(call, True, call.heads, call.head_dim_v)
    bias = contiguous_strides(call.bias_shape) if has_dense_bias(call) and call.bias_shape else None
    if call.page_size:
        columns = -(-call.seqlen_kv // call.page_size)
        k = contiguous_strides((1, call.page_size, call.groups, call.head_dim_qk))
        v = contiguous_strides((1, call.page_size, call.groups, call.head_dim_v))
        strided = Strided(q, k, v, pages=call.batch * columns, columns=columns)
    else:
        tokens = (bucket_tokens(call.batch * size) for size in (call.seqlen_q, call.seqlen_kv))
        modifier, _ = bound_tensors(call, torch.device("cuda", device))
        strided = Strided(q, k, v, None, bias, *tokens, modifier=modifier)
    try:
        _plan(describe_forward, device, call, strided)
        if call.needs_gradient:
            _plan(describe_backward, device, call, strided._replace(grad_output=grad_output))
    except (RuntimeError, TypeError) as error:
        # TypeError: a score_mod passes arguments that a library operation does not accept.
        return str(error).partition("\n")[0]
    return None


def _format_strides(call: AttentionCall, of_queries: bool, heads: int, depth: int) -> Strides:
    tensor_format = call.q_format if of_queries else call.kv_format
    size = call.seqlen_q if of_queries else call.seqlen_kv
    return contiguous_strides(format_shape(tensor_format, call.batch, size, heads, depth, 1))


# By the function that describes the graph, its arguments and the device.
_PLANS: Memory[tuple[Any, int, AttentionCall, Strided], CudnnPlan] = Memory(
    lambda key: planned(*key), MOST_PLANS
)


def _plan(describe: Any, device: int, call: AttentionCall, strided: Strided) -> CudnnPlan:
    """Return the plan for a call. The key has its score_mod program (in `strided`) instead of the functions."""
    plain = call if call.score_mod is None else replace(call, score_mod=None)
    return _PLANS[describe, device, plain, strided]


class _Addressable(NamedTuple):
    """q, k, v, the bias and the tensors of a score_mod in addresses and strides that the library supports."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    strided: Strided
    operands: tuple[Tensor, ...]


def _addressable(call: AttentionCall, inputs: AttentionInputs) -> _Addressable:
    """Return the inputs; tensors that are not aligned to 16 bytes are copied."""
    q, k, v = aligned(inputs.q), aligned(inputs.k), aligned(inputs.v)
    bias = None
    if has_dense_bias(call):
        assert inputs.bias is not None
        bias = inputs.bias.detach()
        if call.bias == "pre_scale_bias":
            bias = bias * call.scale
        bias = bias.to(call.dtype).contiguous()
    pages = columns = 0
    if call.page_size:
        assert inputs.page_table is not None
        pages, columns = k.shape[0], inputs.page_table.shape[1]
    modifier, operands = bound_tensors(call, q.device)
    strided = Strided(
        q.stride(),
        k.stride(),
        v.stride(),
        None,
        None if bias is None else bias.stride(),
        bucket_tokens(q.shape[0]) if call.q_format == "thd" else 0,
        bucket_tokens(k.shape[0]) if call.kv_format == "thd" else 0,
        pages,
        columns,
        modifier,
    )
    return _Addressable(q, k, v, bias, strided, operands)


def aligned(x: Tensor) -> Tensor:
    """Return x, or a contiguous copy if its address or a stride is not a multiple of 16 bytes."""
    unit = 16 // x.element_size()
    if x.data_ptr() % 16 == 0 and x.stride(-1) == 1:
        for stride in x.stride()[:-1]:
            if stride % unit or stride == 0:
                break
        else:
            return x
    return x.clone(memory_format=torch.contiguous_format)


def _common(
    call: AttentionCall, inputs: AttentionInputs, addressable: _Addressable
) -> dict[str, int]:
    """Addresses of the tensors that both passes read."""
    pointers = {
        "q": addressable.q.data_ptr(),
        "k": addressable.k.data_ptr(),
        "v": addressable.v.data_ptr(),
    }
    if addressable.bias is not None:
        pointers["bias"] = addressable.bias.data_ptr()
    if call.mask.padding:
        assert inputs.lengths_q is not None and inputs.lengths_kv is not None
        pointers["lengths_q"] = inputs.lengths_q.data_ptr()
        pointers["lengths_kv"] = inputs.lengths_kv.data_ptr()
    if inputs.sink is not None:
        pointers["sink"] = inputs.sink.data_ptr()
    if addressable.strided.modifier is not None:
        for operand, tensor in zip(
            addressable.strided.modifier.operands, addressable.operands, strict=True
        ):
            pointers[operand.role] = tensor.data_ptr()
    return pointers


def _allocate_result(
    call: AttentionCall, like: Tensor, depth: int, starts: Tensor | None
) -> Tensor:
    """Allocate a result [.., heads, depth] whose tokens that belong to no sequence are zero.

    Args:
        starts: Packed sequence starts; None without packing.
    """
    shape = (*like.shape[:-1], depth)
    if starts is None or not call.padded_between:
        x = torch.empty(shape, dtype=call.dtype, device=like.device)
        if starts is not None:
            zero_padding(x, starts)
        return x
    return torch.zeros(shape, dtype=call.dtype, device=like.device)


def forward(call: AttentionCall, inputs: AttentionInputs) -> Attended:
    """Compute o = softmax(scale * q k^T + bias) v and the log of the softmax denominator."""
    addressable = _addressable(call, inputs)
    device = addressable.q.device
    plan = _plan(describe_forward, device.index, call, addressable.strided)
    packed = call.q_format == "thd"
    output = _allocate_result(
        call, addressable.q, call.head_dim_v, inputs.starts_q if packed else None
    )
    pointers = _common(call, inputs, addressable)
    pointers["output"] = output.data_ptr()
    rng_state = lse = score_sum = None
    rows = (
        (addressable.q.shape[0], call.heads) if packed else (call.batch, call.heads, call.seqlen_q)
    )
    if call.needs_gradient or call.max_logit:
        lse = torch.empty(rows, dtype=torch.float32, device=device)
        pointers["stats"] = pointers["score_max"] = lse.data_ptr()
    if call.max_logit:
        score_sum = torch.empty(rows, dtype=torch.float32, device=device)
        pointers["score_sum"] = score_sum.data_ptr()
    if call.dropout > 0.0:
        rng_state = random_state(device)
        pointers["seed"] = rng_state.data_ptr()
        pointers["offset"] = pointers["seed"] + rng_state.element_size()
    if call.page_size:
        assert inputs.page_table is not None
        pointers["page_table"] = pointers["page_table_v"] = inputs.page_table.data_ptr()
    offsets, alive = make_ragged_offsets(plan, inputs.starts_q, inputs.starts_kv)
    plan.run(pointers, device, offsets)
    del alive
    if call.mask.padding and not (call.same_lengths or call.cached):
        # Sequences without keys: 0 in the output and -inf in the logarithm, in place.
        assert inputs.lengths_kv is not None
        none = inputs.lengths_kv == 0
        if call.q_format == "thd":
            assert inputs.starts_q is not None
            token = torch.arange(output.shape[0], dtype=torch.int32, device=output.device)
            sequence = torch.searchsorted(inputs.starts_q, token, right=True) - 1
            none = none[sequence.clamp_(max=call.batch - 1)]
            rows, statistics = none[:, None, None], none[:, None]
        else:
            rows = (
                none[None, :, None, None] if call.q_format == "sbhd" else none[:, None, None, None]
            )
            statistics = none[:, None, None]
        output.masked_fill_(rows, 0.0)
        if lse is not None:
            lse.masked_fill_(statistics, -torch.inf)
    max_logit = None
    if score_sum is not None and lse is not None:
        max_logit = lse.amax(dim=(0, 2))
        lse = lse + score_sum.log_()
    return Attended(output, lse.t() if packed and lse is not None else lse, rng_state, max_logit)


def _allocate_gradients(
    call: AttentionCall, inputs: AttentionInputs, addressable: _Addressable
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate contiguous gradients of q, k and v."""
    starts_q = inputs.starts_q if call.q_format == "thd" else None
    starts_kv = inputs.starts_kv if call.kv_format == "thd" else None
    return (
        _allocate_result(call, addressable.q, call.head_dim_qk, starts_q),
        _allocate_result(call, addressable.k, call.head_dim_qk, starts_kv),
        _allocate_result(call, addressable.v, call.head_dim_v, starts_kv),
    )


def backward(
    call: AttentionCall,
    inputs: AttentionInputs,
    attended: Attended,
    grad_output: Tensor,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Gradients:
    """Compute the gradients of q, k, v, and of the bias and the sink if they are needed; `into` as in `Passes`."""
    if into is None and call.q_format == "thd" and not inputs.q.is_contiguous():
        # The library writes a ragged grad_q with the strides of q.
        inputs = inputs._replace(q=inputs.q.contiguous())
    addressable = _addressable(call, inputs)
    if into is not None and addressable.q.stride() != into[0].stride():  # a copy of an unaligned q
        gradients = backward(call, inputs, attended, grad_output)
        for target, gradient in zip(into, gradients[:3], strict=True):
            target.copy_(gradient)
        return gradients
    of_result = None if into is None else (into[0].stride(), into[1].stride(), into[2].stride())
    device = addressable.q.device
    grad_output = aligned(grad_output)
    assert attended.lse is not None
    stats = (attended.lse.t() if call.q_format == "thd" else attended.lse).contiguous()
    output = attended.output.contiguous()
    strided = addressable.strided._replace(grad_output=grad_output.stride(), gradients=of_result)
    plan = _plan(describe_backward, device.index, call, strided)
    grad_q, grad_k, grad_v = (
        _allocate_gradients(call, inputs, addressable) if into is None else into
    )
    pointers = _common(call, inputs, addressable)
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
    if addressable.bias is not None:
        grad_bias = torch.zeros(addressable.bias.shape, dtype=call.dtype, device=device)
        pointers["grad_bias"] = grad_bias.data_ptr()
    if has_sink_gradient(call):
        grad_sink = torch.zeros(call.heads, dtype=torch.float32, device=device)
        pointers["grad_sink"] = grad_sink.data_ptr()
    offsets, alive = make_ragged_offsets(plan, inputs.starts_q, inputs.starts_kv)
    plan.run(pointers, device, offsets)
    del alive
    if call.softmax == "learnable" and grad_sink is None:
        # dsink [h] = -sum exp(sink - lse) sum_d(do o), in a fixed order.
        assert inputs.sink is not None
        inner = (grad_output.float() * output.float()).sum(dim=-1)
        inner = inner.permute(1, 2, 0) if call.q_format == "sbhd" else inner.transpose(1, 2)
        share = torch.exp(inputs.sink[None, :, None] - stats)
        # Rows without a token have no logarithm, and no output.
        grad_sink = -torch.where(inner == 0.0, 0.0, share * inner).sum(dim=(0, 2))
    if not call.bias_gradient:
        grad_bias = None
    elif grad_bias is not None and inputs.bias is not None:
        if call.bias == "pre_scale_bias":
            grad_bias = grad_bias * call.scale
        grad_bias = grad_bias.to(inputs.bias.dtype)
    return Gradients(grad_q, grad_k, grad_v, grad_bias, grad_sink)


PASSES = Passes("cudnn", forward, backward, backward)
BACKEND = Backend(
    "cudnn", takes=TAKES, unsupported_reason=unsupported_reason, bind=bind, opaque=True
)
