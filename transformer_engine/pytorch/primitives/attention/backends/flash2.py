"""FlashAttention-2, the compiled package flash-attn, if it is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from typing import Any

from .....common import optional
from .....common.dispatch import Backend
from ..call import AttentionCall, AttentionInputs, AttentionResult, Feature
from ..layout import batch_first
from ..packed import zero_padding
from ..passes import Differentiable
from .limits import FLASH, unsupported_beyond_flash


def _installed() -> str | None:
    try:
        return version("flash-attn")
    except PackageNotFoundError:
        return None


# A constant, so that a compiler tracing through `unsupported_reason` reads it as one.
VERSION: str | None = _installed()
_LARGEST_HEAD = 256
# Supported releases: FIRST <= release < END.
FIRST, END = (2, 1, 1), (2, 8, 4)
# The first release with an option.
WINDOWS = (2, 3, 0)
ALIBI = (2, 4, 0)
DETERMINISTIC = (2, 4, 1)
SOFTCAP = (2, 6, 0)
# The first release with kernels for 10.0 and higher, if it was built with CUDA 12.8; and the first
# whose gradients for heads above 192 fit into 99 KiB of shared memory, without dropout.
BLACKWELL, SMALL_GRADIENTS = (2, 7, 3), (2, 5, 5)
_WIDE_HEAD = 192
TAKES = FLASH | {Feature.ALIBI, Feature.DROPOUT, Feature.SOFTCAP}


def release(version: str) -> tuple[int, ...]:
    """Return (major, minor, patch) of a version, without local parts (+cu128) and suffixes (.post1)."""
    numbers = []
    for part in version.split("+")[0].split(".")[:3]:
        digits = "".join(takewhile(str.isdigit, part))
        numbers.append(int(digits) if digits else 0)
    return (*numbers, 0, 0)[:3]


def is_supported(version: str) -> bool:
    """Return whether this backend supports a flash-attn 2 release."""
    return FIRST <= release(version) < END


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return the reason why the call is unsupported; None if it is supported."""
    if not (call.switches.flash and call.switches.flash2):
        return "NVTE_FLASH_ATTN=0" if not call.switches.flash else "NVTE_FLASH_ATTN_V2=0"
    if VERSION is None:
        return "flash-attn is not installed (pip install flash-attn)"
    if not is_supported(VERSION):
        return f"flash-attn {VERSION} is not a version from 2.1.1 up to, not including, 2.8.4"
    installed = release(VERSION)
    if installed < WINDOWS and call.mask.banded and not call.mask.causal:
        return f"flash-attn {VERSION} has no sliding window, which came with 2.3"
    if installed < ALIBI and call.bias == "alibi":
        return f"flash-attn {VERSION} has no ALiBi, which came with 2.4"
    if installed < DETERMINISTIC and call.deterministic:
        return f"flash-attn {VERSION} has no deterministic backward pass, which came with 2.4.1"
    if installed < SOFTCAP and call.softcap != 0.0:
        return f"flash-attn {VERSION} has no softcap, which came with 2.6"
    if call.softcap != 0.0 and call.dropout > 0.0:
        return "softcap together with attention_dropout"
    reason = unsupported_beyond_flash(call, _LARGEST_HEAD) or _unsupported_hardware(call, installed)
    return reason or optional.failure("flash_attn", "flash_attn_func", "flash_attn_varlen_func")


def _unsupported_hardware(call: AttentionCall, installed: tuple[int, ...]) -> str | None:
    """Return the reason why a release does not support the call's GPU, or None."""
    hardware = call.hardware
    if installed < BLACKWELL and not hardware.has("early flash attention 2"):
        return (
            f"flash-attn {VERSION} has no kernels for {hardware.title}, 2.7.3 and higher have if they are built with "
            "CUDA 12.8; pip install --upgrade --no-build-isolation flash-attn"
        )
    if (
        not call.needs_gradient
        or call.head_dim_qk <= _WIDE_HEAD
        or hardware.has("flash attention 2 of wide heads")
    ):
        return None
    if call.dropout > 0.0:
        return f"a gradient of heads of size {call.head_dim_qk} > {_WIDE_HEAD} with dropout on {hardware.title}"
    if installed < SMALL_GRADIENTS:
        return (
            f"flash-attn {VERSION} has no gradient of heads of size {call.head_dim_qk} > {_WIDE_HEAD} on "
            f"{hardware.title}, 2.5.5 and higher have; pip install --upgrade flash-attn"
        )
    return None


def run(call: AttentionCall, inputs: AttentionInputs) -> AttentionResult:
    """Compute the attention of a call, differentiable by the package's own autograd."""
    from flash_attn import (  # pyright: ignore[reportMissingImports]
        flash_attn_func,
        flash_attn_varlen_func,
    )

    options: dict[str, Any] = {
        "dropout_p": call.dropout,
        "softmax_scale": call.scale,
        "causal": call.mask.causal,
    }
    installed = FIRST if VERSION is None else release(VERSION)
    if installed >= WINDOWS:
        window = call.mask.window
        options["window_size"] = (-1, -1) if window == (-1, 0) else window
    if installed >= ALIBI:
        options["alibi_slopes"] = inputs.slopes
    if installed >= DETERMINISTIC:
        options["deterministic"] = call.deterministic
    if call.softcap != 0.0:
        options["softcap"] = call.softcap
    if not call.packed:
        q, k, v = (batch_first(call.q_format, x) for x in inputs[:3])
        out = flash_attn_func(q, k, v, **options)
        return AttentionResult(batch_first(call.q_format, out).flatten(-2))
    bounds = (inputs.starts_q, inputs.starts_kv, call.seqlen_q, call.seqlen_kv)
    out = flash_attn_varlen_func(*inputs[:3], *bounds, **options)
    assert inputs.starts_q is not None
    zero_padding(out.detach(), inputs.starts_q)
    return AttentionResult(out.flatten(-2))


WHOLE = Differentiable("flash2", run)
BACKEND = Backend(
    "flash2", takes=TAKES, unsupported_reason=unsupported_reason, bind=lambda call: WHOLE
)
