"""o = flash-attn-4's kernels in CuTe DSL (package flash-attn-4): Hopper and Blackwell.

A kernel is compiled when its kind of request first comes, in 3 to 10 seconds. Diagonals end in the last query and
key. With lengths shorter than the tensors, the library leaves the other rows as they are, hence the zeros.
"""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from .....common import optional
from .....common.dispatch import Backend
from ..layout import batch_first
from ..packed import zero_behind
from ..passes import Passes
from ..request import Attended, AttentionInputs, AttentionRequest, Feature, Gradients
from .limits import FLASH, refuses_beyond_flash


def _installed() -> str | None:
    try:
        return version("flash-attn-4")
    except PackageNotFoundError:
        return None


# A constant, so that a compiler tracing through `refuses` reads it as one.
VERSION: str | None = _installed()
_LARGEST_HEAD = 256
TAKES = FLASH | {
    Feature.OFF_BY_ONE,
    Feature.LEARNABLE,
    Feature.PADDING,
    Feature.PADDED_BETWEEN,
    Feature.TWO_SIZES,
    Feature.CACHED,
    Feature.PAGED,
}
# Version 4.0.0b36 gives wrong gradients for heads of size 40 on Hopper.
_MULTIPLE = 32


def refuses(r: AttentionRequest) -> str | None:
    """Why this backend cannot take the request; None if it can."""
    if not (r.device.switches.flash and r.device.switches.flash4):
        return "NVTE_FLASH_ATTN=0" if not r.device.switches.flash else "NVTE_FLASH_ATTN_V4=0"
    if VERSION is None:
        return "flash-attn-4 is not installed (pip install flash-attn-4)"
    refusal = refuses_beyond_flash(r, _LARGEST_HEAD, _MULTIPLE)
    if refusal is not None:
        return refusal
    if r.device.capability[0] not in (9, 10):
        return f"compute capability {r.device.capability[0]}.{r.device.capability[1]}; it takes 9.x and 10.x"
    if (
        r.device.capability[0] == 10
        and (r.shape.head_dim_qk, r.shape.head_dim_v) != (192, 128)
        and r.shape.head_dim_qk > 128
    ):
        return f"heads of size ({r.shape.head_dim_qk}, {r.shape.head_dim_v}) > 128 on compute capability 10.x"
    if r.device.deterministic and r.options.needs_gradient and 64 < r.shape.head_dim_qk <= 96:
        return f"a deterministic gradient with heads of size {r.shape.head_dim_qk} in 65..96"
    if (
        r.options.needs_gradient
        and r.shape.head_dim_qk != r.shape.head_dim_v
        and r.shape.groups != r.shape.heads
    ):
        return f"a gradient of grouped heads of two sizes, {r.shape.head_dim_qk} and {r.shape.head_dim_v}"
    if r.shape.page_size and r.options.needs_gradient:
        return "a gradient through a paged cache"
    return optional.failure("flash_attn.cute.interface", "_flash_attn_fwd", "_flash_attn_bwd")


def forward(request: AttentionRequest, inputs: AttentionInputs) -> Attended:
    """Attention by _flash_attn_fwd, in the layout of the request."""
    # The package's names for its two passes apart are private; its public function ties them to its own autograd.
    from flash_attn.cute.interface import _flash_attn_fwd

    rewrites = _leaves_rows(request)
    out = _rows(request, inputs.q, request.shape.heads, request.shape.head_dim_v, rewrites)
    found = _flash_attn_fwd(
        batch_first(request.shape.q_format, inputs.q),
        batch_first(request.shape.kv_format, inputs.k),
        batch_first(request.shape.kv_format, inputs.v),
        out=batch_first(request.shape.q_format, out),
        max_seqlen_q=request.shape.seqlen_q,
        max_seqlen_k=request.shape.seqlen_kv,
        page_table=inputs.page_table,
        learnable_sink=inputs.sink,
        return_lse=request.options.needs_gradient,
        **_arguments(request, inputs),
    )
    if request.packed and not rewrites:
        assert inputs.starts_q is not None
        zero_behind(out, inputs.starts_q)
    return Attended(out, found[1])


def backward(
    request: AttentionRequest, inputs: AttentionInputs, attended: Attended, grad_output: Tensor
) -> Gradients:
    """Gradients by _flash_attn_bwd."""
    from flash_attn.cute.interface import _flash_attn_bwd

    assert attended.lse is not None
    rewrites = _leaves_rows(request)
    q, k, v = inputs.q, inputs.k, inputs.v
    grad_q = _rows(request, q, request.shape.heads, request.shape.head_dim_qk, rewrites)
    grad_k = _rows(request, k, request.shape.groups, request.shape.head_dim_qk, rewrites)
    grad_v = _rows(request, v, request.shape.groups, request.shape.head_dim_v, rewrites)
    view = functools.partial(batch_first, request.shape.q_format)
    found = _flash_attn_bwd(
        view(q),
        view(k),
        view(v),
        view(attended.output),
        view(grad_output),
        attended.lse,
        dq=view(grad_q),
        dk=view(grad_k),
        dv=view(grad_v),
        max_seqlen_q=request.shape.seqlen_q,
        max_seqlen_k=request.shape.seqlen_kv,
        deterministic=request.device.deterministic,
        learnable_sink=inputs.sink,
        **_arguments(request, inputs),
    )
    if request.packed and not rewrites:
        assert inputs.starts_q is not None and inputs.starts_kv is not None
        zero_behind(grad_q, inputs.starts_q)
        zero_behind(grad_k, inputs.starts_kv)
        zero_behind(grad_v, inputs.starts_kv)
    return Gradients(grad_q, grad_k, grad_v, None, None if inputs.sink is None else found[3])


def _arguments(request: AttentionRequest, inputs: AttentionInputs) -> dict[str, Any]:
    """What both passes are told about mask and lengths."""
    left, right = request.options.mask.window
    shortened = _leaves_rows(request)
    cached = request.options.mask.padding and request.shape.kv_format != "thd"
    return {
        "softmax_scale": request.options.scale,
        "causal": (left, right) == (-1, 0),
        "window_size_left": None if left < 0 else left,
        "window_size_right": None if right < 0 or (left, right) == (-1, 0) else right,
        "cu_seqlens_q": inputs.starts_q if request.packed else None,
        "cu_seqlens_k": inputs.starts_kv if request.shape.kv_format == "thd" else None,
        "seqused_q": inputs.lengths_q if shortened else None,
        "seqused_k": inputs.lengths_kv if shortened or cached else None,
    }


def _leaves_rows(request: AttentionRequest) -> bool:
    """Are there rows, other than behind the last packed sequence, that belong to no sequence?"""
    if request.packed:
        return request.options.padded_between
    return request.options.mask.padding


def _rows(request: AttentionRequest, like: Tensor, heads: int, size: int, zero: bool) -> Tensor:
    """[.., heads, size] with the leading axes of `like`, in one piece."""
    shape = (*like.shape[:-2], heads, size)
    if zero:
        return torch.zeros(shape, dtype=request.shape.dtype, device=like.device)
    return torch.empty(shape, dtype=request.shape.dtype, device=like.device)


PASSES = Passes("flash4", forward, backward)
BACKEND = Backend("flash4", takes=TAKES, refuses=refuses, bind=lambda request: PASSES, opaque=True)
