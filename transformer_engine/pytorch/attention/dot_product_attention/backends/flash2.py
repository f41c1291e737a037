"""o = flash-attention 2, the compiled package flash-attn, where a user has it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from torch import Tensor

from .....common.dispatch import Backend
from ..request import AttentionInputs, AttentionRequest, AttentionResult
from ..tail import clear_tail
from .limits import refuses_beyond_flash, refuses_top_left


def _installed() -> str | None:
    try:
        return version("flash-attn")
    except PackageNotFoundError:
        return None


# A constant, so that a compiler tracing through `refuses` reads it as one.
VERSION: str | None = _installed()
_LARGEST_HEAD = 256


def refuses(r: AttentionRequest) -> str | None:
    if not (r.switches.flash and r.switches.flash2):
        return "NVTE_FLASH_ATTN=0" if not r.switches.flash else "NVTE_FLASH_ATTN_V2=0"
    if VERSION is None:
        return "flash-attn is not installed (pip install flash-attn)"
    if not VERSION.startswith("2.") or tuple(map(int, VERSION.split(".")[:2])) < (2, 4):
        return f"flash-attn {VERSION} is not a version from 2.4 on"
    refusal = refuses_beyond_flash(r, _LARGEST_HEAD, alibi=True, dropout=True) or refuses_top_left(r)
    return refusal or refuses_loose_sequences(r)


def refuses_loose_sequences(r: AttentionRequest) -> str | None:
    """Why a function for dense or closely packed sequences cannot take the request; None if it can."""
    if r.head_dim_qk != r.head_dim_v:
        return f"heads of two sizes, {r.head_dim_qk} and {r.head_dim_v}"
    if r.q_format != r.kv_format or r.page_size:
        return "a cache of keys and values; it is not called for one"
    if r.mask.padding and not r.packed:
        return f"padding with qkv_format={r.q_format!r}; it takes lengths with 'thd' only"
    if r.padded_between:
        return "padding between packed sequences; pack them closely"
    return None


def run(request: AttentionRequest, inputs: AttentionInputs) -> AttentionResult:
    """The attention of a request, differentiable by the package's own autograd."""
    from flash_attn import (  # pyright: ignore[reportMissingImports]
        flash_attn_func,
        flash_attn_varlen_func,
    )

    options = {
        "dropout_p": request.dropout,
        "softmax_scale": request.scale,
        "causal": request.mask.window == (-1, 0),
        "window_size": request.mask.window if request.mask.window != (-1, 0) else (-1, -1),
        "alibi_slopes": inputs.slopes,
        "deterministic": request.deterministic,
    }
    if not request.packed:
        q, k, v = (batch_first(request, x) for x in inputs[:3])
        out = flash_attn_func(q, k, v, **options)
        return AttentionResult(batch_first(request, out).flatten(-2))
    bounds = (inputs.starts_q, inputs.starts_kv, request.seqlen_q, request.seqlen_kv)
    out = flash_attn_varlen_func(*inputs[:3], *bounds, **options)
    assert inputs.starts_q is not None
    clear_tail(out.detach(), inputs.starts_q)
    return AttentionResult(out.flatten(-2))


def batch_first(request: AttentionRequest, x: Tensor) -> Tensor:
    """[b, s, ..] of x in the request's dense format, and the other way round."""
    return x.transpose(0, 1) if request.q_format == "sbhd" else x


BACKEND = Backend("flash2", run, refuses)
