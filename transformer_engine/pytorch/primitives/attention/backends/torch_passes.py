"""forward, backward = torch_passes(call, inputs): torch's own attention kernels as separate passes.

`scaled_dot_product_attention` chooses among libraries by shapes, strides and torch's switches, and couples both passes
in its own autograd nodes. A node that computes more than an attention makes the same choice and calls the same kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .....common.memory import Memory
from ..call import Attended, AttentionCall, AttentionInputs, Gradients
from ..layout import heads_first, heads_last
from ..passes import Passes
from . import torch_cudnn, torch_flash

# Results of torch's choice, numbered as in torch.nn.attention.SDPBackend.
_FLASH, _CUDNN = 1, 3
_MOST = 1 << 10

Key = tuple[Any, ...]


def torch_passes(call: AttentionCall, inputs: AttentionInputs) -> Passes | None:
    """Return the passes for dense q, k, v without dropout; None if torch has no separate ones."""
    q, k, v = inputs.q, inputs.k, inputs.v
    has = torch._C
    return _CHOSEN[
        call,
        (q.stride(), k.stride(), v.stride()),
        q.device,
        torch.get_deterministic_debug_mode(),
        has._get_flash_sdp_enabled(),
        has._get_cudnn_sdp_enabled(),
        has._get_mem_efficient_sdp_enabled(),
        has._get_math_sdp_enabled(),
        tuple(has._get_sdp_priority_order()),
    ]


def _torch_choice(key: Key) -> Passes | None:
    """Return torch's choice for such tensors, which it makes for tensors without values."""
    call: AttentionCall = key[0]
    strides, device = key[1], key[2]
    grouped = call.groups != call.heads
    needs_gradient = call.needs_gradient
    sizes = (
        (call.seqlen_q, call.heads, call.head_dim_qk),
        (call.seqlen_kv, call.groups, call.head_dim_qk),
        (call.seqlen_kv, call.groups, call.head_dim_v),
    )
    views = []
    for (tokens, heads, size), stride in zip(sizes, strides, strict=True):
        leading = (tokens, call.batch) if call.q_format == "sbhd" else (call.batch, tokens)
        x = torch.empty_strided(
            (*leading, heads, size),
            stride,
            dtype=call.dtype,
            device=device,
            requires_grad=needs_gradient,
        )
        views.append(heads_first(call.q_format, x))
    q, k, v = views
    choice = torch._fused_sdp_choice(
        q, k, v, None, 0.0, call.banded, scale=call.scale, enable_gqa=grouped
    )
    if device.type == "cpu":
        # its kernel supports no grouped heads
        return CPU if choice == _FLASH and not grouped else None
    return {_FLASH: torch_flash.PASSES, _CUDNN: torch_cudnn.PASSES}.get(choice)


_CHOSEN: Memory[Key, Passes | None] = Memory(_torch_choice, _MOST)


def _forward_on_a_cpu(call: AttentionCall, inputs: AttentionInputs) -> Attended:
    form, scale = call.q_format, call.scale
    q, k, v = (heads_first(form, x) for x in inputs[:3])
    out, lse = torch._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, call.banded, scale=scale
    )
    return Attended(heads_last(form, out).contiguous(), lse)


def _backward_on_a_cpu(
    call: AttentionCall, inputs: AttentionInputs, attended: Attended, grad_output: Tensor
) -> Gradients:
    form, scale = call.q_format, call.scale
    operands = [heads_first(form, x) for x in (grad_output, *inputs[:3], attended.output)]
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *operands, attended.lse, 0.0, call.banded, scale=scale
    )
    return Gradients(*(heads_last(form, x) for x in gradients))


CPU = Passes("torch_sdpa", _forward_on_a_cpu, _backward_on_a_cpu)
