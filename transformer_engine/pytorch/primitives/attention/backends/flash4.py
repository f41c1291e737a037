"""FlashAttention-4, kernels in the CuTe DSL (package flash-attn-4) for Hopper and Blackwell.

The first of equal calls compiles a kernel in 3 to 10 seconds. Diagonals end at the last query and key. The
library does not write rows behind the length of a sequence, so those are allocated as zeros.
"""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from .....common import optional
from .....common.dispatch import Backend
from ....runtime.tracing import constant_while_tracing
from ..call import Attended, AttentionCall, AttentionInputs, Feature, Gradients
from ..layout import batch_first
from ..packed import zero_padding
from ..passes import Passes
from .limits import FLASH, unsupported_beyond_flash


def _installed() -> str | None:
    try:
        return version("flash-attn-4")
    except PackageNotFoundError:
        return None


# A constant, so that a compiler tracing through `unsupported_reason` reads it as one.
VERSION: str | None = _installed()
_LARGEST_HEAD = 256
_FIRST_OF_ALL = "4.0.0b36"  # first release with kernels for compute capability 11.0 and 12.x
TAKES = FLASH | {
    Feature.OFF_BY_ONE,
    Feature.LEARNABLE,
    Feature.SOFTCAP,
    Feature.PADDING,
    Feature.PADDED_BETWEEN,
    Feature.TWO_SIZES,
    Feature.CACHED,
    Feature.PAGED,
}
# Version 4.0.0b36 gives wrong gradients for head size 40 on Hopper.
_MULTIPLE = 32


@constant_while_tracing
def _has_kernels_of_all(release: str) -> bool:
    return Version(release) >= Version(_FIRST_OF_ALL)


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return the reason why the call is unsupported; None if it is supported."""
    if not (call.switches.flash and call.switches.flash4):
        return "NVTE_FLASH_ATTN=0" if not call.switches.flash else "NVTE_FLASH_ATTN_V4=0"
    if VERSION is None:
        return "flash-attn-4 is not installed (pip install flash-attn-4)"
    reason = unsupported_beyond_flash(call, _LARGEST_HEAD, _MULTIPLE)
    if reason is not None:
        return reason
    if (reason := call.hardware.lacks("flash attention 4")) is not None:
        return reason
    if not call.hardware.has("early flash attention 4") and not _has_kernels_of_all(VERSION):
        return (
            f"flash-attn-4 {VERSION} has no kernels for {call.hardware.title}, {_FIRST_OF_ALL} has; "
            "pip install --pre --upgrade flash-attn-4"
        )
    if call.cached and (reason := call.hardware.lacks("flash attention 4 of a cache")) is not None:
        return reason
    sizes = call.head_dim_qk, call.head_dim_v
    reason = call.hardware.lacks("flash attention 4 of wide heads")
    if reason is not None and call.head_dim_qk > 128 and sizes != (192, 128):
        return f"heads of size {sizes} > 128: {reason}"
    if call.demands_determinism and 64 < call.head_dim_qk <= 96:
        return f"a deterministic gradient with heads of size {call.head_dim_qk} in 65..96"
    if call.needs_gradient and call.head_dim_qk != call.head_dim_v and call.groups != call.heads:
        return f"a gradient of grouped heads of two sizes, {call.head_dim_qk} and {call.head_dim_v}"
    if call.page_size and call.needs_gradient:
        return "a gradient through a paged cache"
    reason = optional.failure("flash_attn.cute.interface", "_flash_attn_fwd", "_flash_attn_bwd")
    return reason if reason is not None or call.softcap == 0.0 else _unsupported_softcap(call)


def _unsupported_softcap(call: AttentionCall) -> str | None:
    """Return the reason why the softcap of a call is unsupported, or None."""
    assert VERSION is not None
    if not _has_kernels_of_all(VERSION):
        return f"softcap with flash-attn-4 {VERSION}; {_FIRST_OF_ALL} has its gradient"
    if call.needs_gradient and (
        reason := call.hardware.lacks("flash attention 4 gradients of scores")
    ):
        return reason
    names = ("create_softcap_scoremod", "create_softcap_scoremod_bwd")
    return optional.failure("flash_attn.cute.utils", *names)


# The library compiles one kernel per score function, and hashes the source of a new function.
@functools.lru_cache(maxsize=64)
def _score_functions(softcap: float) -> tuple[Any, Any]:
    """Return the library's functions softcap * tanh(score / softcap) and its derivative, cached by the softcap."""
    from flash_attn.cute import utils

    return utils.create_softcap_scoremod(softcap), utils.create_softcap_scoremod_bwd(softcap)


def forward(call: AttentionCall, inputs: AttentionInputs) -> Attended:
    """Compute attention by _flash_attn_fwd, in the layout of the call."""
    # The package's names for its two passes apart are private; its public function ties them to its own autograd.
    from flash_attn.cute.interface import _flash_attn_fwd

    rewrites = _leaves_rows(call)
    out = _rows(call, inputs.q, call.heads, call.head_dim_v, rewrites)
    result = _flash_attn_fwd(
        batch_first(call.q_format, inputs.q),
        batch_first(call.kv_format, inputs.k),
        batch_first(call.kv_format, inputs.v),
        out=batch_first(call.q_format, out),
        max_seqlen_q=call.seqlen_q,
        max_seqlen_k=call.seqlen_kv,
        page_table=inputs.page_table,
        learnable_sink=inputs.sink,
        return_lse=call.needs_gradient,
        **_score_mods(call, "score_mod"),
        **_arguments(call, inputs),
    )
    if call.packed and not rewrites:
        assert inputs.starts_q is not None
        zero_padding(out, inputs.starts_q)
    return Attended(out, result[1])


def backward(
    call: AttentionCall, inputs: AttentionInputs, attended: Attended, grad_output: Tensor
) -> Gradients:
    """Compute gradients by _flash_attn_bwd."""
    from flash_attn.cute.interface import _flash_attn_bwd

    assert attended.lse is not None
    rewrites = _leaves_rows(call)
    q, k, v = inputs.q, inputs.k, inputs.v
    grad_q = _rows(call, q, call.heads, call.head_dim_qk, rewrites)
    grad_k = _rows(call, k, call.groups, call.head_dim_qk, rewrites)
    grad_v = _rows(call, v, call.groups, call.head_dim_v, rewrites)
    view = functools.partial(batch_first, call.q_format)
    gradients = _flash_attn_bwd(
        view(q),
        view(k),
        view(v),
        view(attended.output),
        view(grad_output),
        attended.lse,
        dq=view(grad_q),
        dk=view(grad_k),
        dv=view(grad_v),
        max_seqlen_q=call.seqlen_q,
        max_seqlen_k=call.seqlen_kv,
        deterministic=call.deterministic,
        **_score_mods(call, "score_mod", "score_mod_bwd"),
        learnable_sink=inputs.sink,
        **_arguments(call, inputs),
    )
    if call.packed and not rewrites:
        assert inputs.starts_q is not None and inputs.starts_kv is not None
        zero_padding(grad_q, inputs.starts_q)
        zero_padding(grad_k, inputs.starts_kv)
        zero_padding(grad_v, inputs.starts_kv)
    return Gradients(grad_q, grad_k, grad_v, None, None if inputs.sink is None else gradients[3])


def _arguments(call: AttentionCall, inputs: AttentionInputs) -> dict[str, Any]:
    """Return the arguments of both passes for mask and lengths."""
    left, right = call.mask.window
    shortened = _leaves_rows(call)
    cached = call.mask.padding and call.kv_format != "thd"
    return {
        "softmax_scale": call.scale,
        "causal": (left, right) == (-1, 0),
        "window_size_left": None if left < 0 else left,
        "window_size_right": None if right < 0 or (left, right) == (-1, 0) else right,
        "cu_seqlens_q": inputs.starts_q if call.packed else None,
        "cu_seqlens_k": inputs.starts_kv if call.kv_format == "thd" else None,
        "seqused_q": inputs.lengths_q if shortened else None,
        "seqused_k": inputs.lengths_kv if shortened or cached else None,
    }


def _score_mods(call: AttentionCall, *names: str) -> dict[str, Any]:
    """Keyword arguments of a pass for the softcap; none without a softcap, because earlier releases lack them."""
    return (
        {}
        if call.softcap == 0.0
        else dict(zip(names, _score_functions(call.softcap), strict=False))
    )


def _leaves_rows(call: AttentionCall) -> bool:
    """Return whether rows other than those behind the last packed sequence belong to no sequence."""
    if call.packed:
        return call.padded_between
    return call.mask.padding


def _rows(call: AttentionCall, like: Tensor, heads: int, size: int, zero: bool) -> Tensor:
    """Allocate a contiguous [.., heads, size] with the leading axes of `like`."""
    shape = (*like.shape[:-2], heads, size)
    if zero:
        return torch.zeros(shape, dtype=call.dtype, device=like.device)
    return torch.empty(shape, dtype=call.dtype, device=like.device)


PASSES = Passes("flash4", forward, backward)
BACKEND = Backend(
    "flash4",
    takes=TAKES,
    unsupported_reason=unsupported_reason,
    bind=lambda call: PASSES,
    opaque=True,
)
