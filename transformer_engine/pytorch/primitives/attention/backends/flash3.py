"""FlashAttention-3, the compiled module flash_attn_interface for Hopper, if it is installed."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor

from .....common import optional
from .....common.dispatch import Backend
from ....runtime.tracing import constant_while_tracing
from ..call import AttentionCall, AttentionInputs, AttentionResult, Feature
from ..layout import batch_first
from ..packed import zero_padding
from ..passes import Differentiable
from .limits import FLASH, unsupported_beyond_flash

# A constant, so that a compiler tracing through `unsupported_reason` reads it as one.
INSTALLED: bool = optional.installed("flash_attn_interface")
_LARGEST_HEAD = 256
TAKES = FLASH | {Feature.SOFTCAP}
_FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func")


@constant_while_tracing
@functools.cache
def _softcap_failure() -> str | None:
    """Name of a package function without the argument softcap, or None."""
    import flash_attn_interface  # pyright: ignore[reportMissingImports]

    for name in _FUNCTIONS:
        if "softcap" not in inspect.signature(getattr(flash_attn_interface, name)).parameters:
            return name
    return None


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return the reason why the call is unsupported; None if it is supported."""
    if not (call.switches.flash and call.switches.flash3):
        return "NVTE_FLASH_ATTN=0" if not call.switches.flash else "NVTE_FLASH_ATTN_V3=0"
    if not INSTALLED:
        return "flash-attention 3 is not installed (build its hopper folder)"
    reason = unsupported_beyond_flash(call, _LARGEST_HEAD)
    if reason is not None:
        return reason
    if (reason := call.hardware.lacks("flash attention 3")) is not None:
        return reason
    reason = optional.failure("flash_attn_interface", *_FUNCTIONS)
    if reason is None and call.softcap != 0.0 and (name := _softcap_failure()) is not None:
        return f"{name} of the installed flash-attention 3 has no argument softcap; build a later version"
    return reason


def run(call: AttentionCall, inputs: AttentionInputs) -> AttentionResult:
    """Compute the attention of a call, differentiable by the package's own autograd."""
    from flash_attn_interface import (  # pyright: ignore[reportMissingImports]
        flash_attn_func,
        flash_attn_varlen_func,
    )

    causal = call.mask.causal
    options: dict[str, Any] = {
        "softmax_scale": call.scale,
        "causal": causal,
        "window_size": (-1, -1) if causal else call.mask.window,
        "deterministic": call.deterministic,
    }
    if call.softcap != 0.0:
        options["softcap"] = call.softcap
    if not call.packed:
        q, k, v = (batch_first(call.q_format, x) for x in inputs[:3])
        out = _get_output(flash_attn_func(q, k, v, **options))
        return AttentionResult(batch_first(call.q_format, out).flatten(-2))
    bounds = (inputs.starts_q, inputs.starts_kv, call.seqlen_q, call.seqlen_kv)
    out = _get_output(flash_attn_varlen_func(*inputs[:3], *bounds, **options))
    assert inputs.starts_q is not None
    zero_padding(out.detach(), inputs.starts_q)
    return AttentionResult(out.flatten(-2))


def _get_output(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return the output: earlier versions return (output, lse), later ones the output."""
    return result[0] if isinstance(result, tuple) else result


WHOLE = Differentiable("flash3", run)
BACKEND = Backend(
    "flash3", takes=TAKES, unsupported_reason=unsupported_reason, bind=lambda call: WHOLE
)
