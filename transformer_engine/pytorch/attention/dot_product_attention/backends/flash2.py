"""o = flash-attention 2, the compiled package flash-attn, where a user has it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from .....common import optional
from .....common.dispatch import Backend
from ..layout import batch_first
from ..request import AttentionInputs, AttentionRequest, AttentionResult
from ..tail import clear_tail
from .limits import refuses_beyond_flash, refuses_loose_sequences, refuses_top_left


def _installed() -> str | None:
    try:
        return version("flash-attn")
    except PackageNotFoundError:
        return None


# A constant, so that a compiler tracing through `refuses` reads it as one.
VERSION: str | None = _installed()
_LARGEST_HEAD = 256


def refuses(r: AttentionRequest) -> str | None:
    """Why this backend cannot take the request; None if it can."""
    if not (r.switches.flash and r.switches.flash2):
        return "NVTE_FLASH_ATTN=0" if not r.switches.flash else "NVTE_FLASH_ATTN_V2=0"
    if VERSION is None:
        return "flash-attn is not installed (pip install flash-attn)"
    if not VERSION.startswith("2.") or tuple(map(int, VERSION.split(".")[:2])) < (2, 4):
        return f"flash-attn {VERSION} is not a version from 2.4 on"
    refusal = refuses_beyond_flash(r, _LARGEST_HEAD, alibi=True, dropout=True) or refuses_top_left(r)
    refusal = refusal or refuses_loose_sequences(r)
    return refusal or optional.failure("flash_attn", "flash_attn_func", "flash_attn_varlen_func")


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
        q, k, v = (batch_first(request.q_format, x) for x in inputs[:3])
        out = flash_attn_func(q, k, v, **options)
        return AttentionResult(batch_first(request.q_format, out).flatten(-2))
    bounds = (inputs.starts_q, inputs.starts_kv, request.seqlen_q, request.seqlen_kv)
    out = flash_attn_varlen_func(*inputs[:3], *bounds, **options)
    assert inputs.starts_q is not None
    clear_tail(out.detach(), inputs.starts_q)
    return AttentionResult(out.flatten(-2))


BACKEND = Backend("flash2", run, refuses)
