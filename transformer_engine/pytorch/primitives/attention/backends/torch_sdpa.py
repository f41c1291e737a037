"""torch.nn.functional.scaled_dot_product_attention, for the calls that it can express."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .....common.dispatch import Backend
from ....runtime.autograd import is_inside_transform
from ....runtime.double_backward import reject_second_derivative
from .. import layout
from ..call import AttentionCall, AttentionInputs, AttentionResult, Feature
from ..passes import Differentiable
from ..visible import visible as visible_of
from .limits import WITHOUT_DETERMINISM
from .torch_passes import torch_passes

TAKES = frozenset(Feature) - {
    Feature.BATCH_INVARIANT,
    Feature.EMPTY,
    Feature.FP8,
    Feature.FULL_DROPOUT,
    Feature.SCORE_MOD,
    Feature.SOFTCAP,
    Feature.PRE_SCALE_BIAS,
    Feature.POST_SCALE_BIAS,
    Feature.ALIBI,
    Feature.OFF_BY_ONE,
    Feature.LEARNABLE,
    Feature.MAX_LOGIT,
}


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return the reason why the call is unsupported; None if it is supported."""
    if not (call.switches.flash or call.switches.fused):
        return "NVTE_FLASH_ATTN=0 and NVTE_FUSED_ATTN=0"
    if call.demands_determinism and call.device_type == "cuda" and not call.torch_deterministic:
        return f"on CUDA, {WITHOUT_DETERMINISM}"
    return None


def attend(call: AttentionCall, inputs: AttentionInputs) -> AttentionResult:
    """Compute the attention of a call, differentiable in q, k and v."""
    if _is_first_run(call, inputs):
        return _as_recorded(attend, call, inputs)
    q, k, v = layout.dense_qkv(call, inputs)
    if call.plain_causal:
        visible, seeing = None, None
    else:
        visible = visible_of(call, inputs)
        seeing = None if visible is None else visible.any(dim=-1, keepdim=True)
    if visible is not None and seeing is not None:
        # A row without a key would be 0 / 0 in some kernels: it sees all keys instead, and its output is zeroed.
        visible = visible | ~seeing
    native_groups = visible is None and call.head_dim_qk == call.head_dim_v
    if call.groups != call.heads and not native_groups:
        # torch's kernels for a mask or for two head sizes support no grouped heads
        k, v = (
            k.repeat_interleave(call.heads // k.shape[1], dim=1),
            v.repeat_interleave(call.heads // v.shape[1], dim=1),
        )
    out = scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=visible,
        dropout_p=call.dropout,
        is_causal=call.plain_causal,
        scale=call.scale,
        enable_gqa=call.groups != call.heads and native_groups,
    )
    _name_failure(out, q, k, v)
    if seeing is not None:
        out = torch.where(seeing, out, 0)
    return _guard_output(layout.from_bhsd(call, inputs, out).flatten(-2))


def _is_first_run(call: AttentionCall, inputs: AttentionInputs) -> bool:
    """Return whether the call does not record the gradients that it may need in a second run."""
    if not call.needs_gradient or torch.compiler.is_compiling() or is_inside_transform():
        return False
    recorded = inputs.q.requires_grad or inputs.k.requires_grad or inputs.v.requires_grad
    return not (recorded and torch.is_grad_enabled())


def _as_recorded(
    run: Callable[[AttentionCall, AttentionInputs], AttentionResult],
    call: AttentionCall,
    inputs: AttentionInputs,
) -> AttentionResult:
    """Compute run(call, inputs) by the kernels that torch chooses for tensors that require a gradient."""
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
        output, max_logit = run(call, inputs._replace(q=q, k=k, v=v))
    return AttentionResult(output.detach(), max_logit)


def _name_failure(out: Tensor, *inputs: Tensor) -> None:
    """Raise an error that names this backend for a second derivative; torch's error names the gradient of a kernel."""
    if torch.compiler.is_compiling():  # which traces no node
        return
    node = out.grad_fn
    if node is not None and node.name().startswith("ScaledDotProduct"):
        reject_second_derivative("DotProductAttention by torch_sdpa", node, *inputs)


def _guard_output(out: Tensor) -> AttentionResult:
    if out.is_cuda and out.requires_grad and not torch.compiler.is_compiling():
        # On a GPU torch 2.11 reads a gradient sliced from wider rows as if it were contiguous.
        out.register_hook(Tensor.contiguous)
    return AttentionResult(out)


def bind(call: AttentionCall) -> Differentiable:
    """Return the attention of a call; for dense tensors with no mask or a causal one, it is a few operations."""
    if not _is_plain(call):
        return WHOLE
    return Differentiable("torch_sdpa", _dense(call), torch_passes if call.dropout == 0.0 else None)


def _is_plain(call: AttentionCall) -> bool:
    if call.q_format != call.kv_format or call.packed or call.page_size:
        return False
    unmasked = call.mask.name == "no_mask" and not call.mask.banded
    native_heads = call.groups == call.heads or call.head_dim_qk == call.head_dim_v
    return native_heads and (unmasked or call.plain_causal)


def _dense(call: AttentionCall) -> Callable[[AttentionCall, AttentionInputs], AttentionResult]:
    batch, heads, tokens = (1, 2, 0) if call.q_format == "sbhd" else (0, 2, 1)
    order, back = (
        (batch, heads, tokens, 3),
        (2, 0, 1, 3) if call.q_format == "sbhd" else (0, 2, 1, 3),
    )
    causal, dropout, scale = call.plain_causal, call.dropout, call.scale
    grouped = call.groups != call.heads

    def run(call: AttentionCall, inputs: AttentionInputs) -> AttentionResult:
        if _is_first_run(call, inputs):
            return _as_recorded(run, call, inputs)
        out = scaled_dot_product_attention(
            inputs.q.permute(order),
            inputs.k.permute(order),
            inputs.v.permute(order),
            None,
            dropout,
            causal,
            scale=scale,
            enable_gqa=grouped,
        )
        _name_failure(out, inputs.q, inputs.k, inputs.v)
        # A copy even where the view is contiguous, as in layout.from_bhsd.
        return _guard_output(
            out.permute(back).clone(memory_format=torch.contiguous_format).flatten(-2)
        )

    return run


WHOLE = Differentiable("torch_sdpa", attend)
BACKEND = Backend("torch_sdpa", takes=TAKES, unsupported_reason=unsupported_reason, bind=bind)
