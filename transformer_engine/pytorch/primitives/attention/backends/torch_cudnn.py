"""cuDNN's attention as PyTorch calls it (aten::_scaled_dot_product_cudnn_attention): dense, causal or not."""

from __future__ import annotations

import torch
from torch import Tensor

from .....common.dispatch import Backend
from ..call import Attended, AttentionCall, AttentionInputs, Feature, Gradients
from ..layout import heads_first, heads_last
from ..passes import Passes
from .limits import unsupported_beyond_flash, unsupported_by_environment

_LARGEST_HEAD = 128
# Without deterministic gradients: PyTorch does not request them from cuDNN.
TAKES = frozenset({Feature.TOP_LEFT, Feature.GROUPS})


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return the reason why the call is unsupported; None if it is supported."""
    if (
        reason := unsupported_by_environment(call, "torch cudnn attention", other_kind="2")
    ) is not None:
        return reason
    return unsupported_beyond_flash(call, _LARGEST_HEAD)


def forward(call: AttentionCall, inputs: AttentionInputs) -> Attended:
    """Compute attention by PyTorch's operator, in the layout of the call."""
    form = call.q_format
    q, k, v = (heads_first(form, x) for x in inputs[:3])
    result = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, call.needs_gradient, 0.0, call.mask.banded, False, scale=call.scale
    )
    lse = result[1].squeeze(-1) if call.needs_gradient else None
    return Attended(heads_last(form, result[0]).contiguous(), lse)


def backward(
    call: AttentionCall, inputs: AttentionInputs, attended: Attended, grad_output: Tensor
) -> Gradients:
    """Compute gradients by PyTorch's operator."""
    assert attended.lse is not None
    form = call.q_format
    q, k, v = (heads_first(form, x) for x in inputs[:3])
    nothing = torch.empty((), dtype=torch.int64, device=q.device)  # seed and offset for dropout 0
    gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        heads_first(form, grad_output),
        q,
        k,
        v,
        heads_first(form, attended.output),
        attended.lse.unsqueeze(-1),
        nothing,
        nothing,
        None,
        None,
        None,
        call.seqlen_q,
        call.seqlen_kv,
        0.0,
        call.mask.banded,
        scale=call.scale,
    )
    return Gradients(*(heads_last(form, x) for x in gradients))


PASSES = Passes("torch_cudnn", forward, backward)
BACKEND = Backend(
    "torch_cudnn",
    takes=TAKES,
    unsupported_reason=unsupported_reason,
    bind=lambda call: PASSES,
    opaque=True,
)
