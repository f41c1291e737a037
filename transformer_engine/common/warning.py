"""Warnings about arguments and environment variables without effect: once per process and reason."""

from __future__ import annotations

import os
import warnings

from . import env

# Variables whose purpose is met without them: a fusion or an autotuner that does not exist is switched off, a pool that
# does not exist is sized, or the computation needs no permission.
_MET = frozenset(
    """
    NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE NVTE_APPLY_QK_LAYER_SCALING NVTE_UnfusedDPA_Emulate_FP8
    NVTE_BIAS_DROPOUT_FUSION NVTE_CUTLASS_GROUPED_GEMM_WARN_FALLBACK NVTE_FRAMEWORK NVTE_PROJECT_BUILDING
    NVTE_DISABLE_TRITON_AUTOTUNING NVTE_USE_PYTORCH_TRITON NVTE_DISABLE_NVRTC NVTE_UB_WITH_MPI
    NVTE_JAX_ENFORCE_V2_GROUPED_GEMM NVTE_EP_HANDLE_CACHE_SIZE NVTE_TENSOR_HANDLE_POOL_SIZE_MB
    NVTE_GROUPED_TENSOR_HANDLE_POOL_SIZE_MB NVTE_RADIX_TOPK_THRESHOLD NVTE_ONNX_KVCACHE_MAX_SEQ_LEN
    """.split()  # noqa: SIM905 - a quoted name counts as one that the code reads
)
_PREFIX = "Accepted; "
_unused = frozenset(
    row.name
    for row in env.VARIABLES.values()
    if row.meaning.startswith(_PREFIX) and row.name not in _MET
)
_issued: set[str] = set()
_warned: set[str] = set()  # environment variable names


def warn_once(reason: str, message: str, stacklevel: int = 3) -> None:
    """Issue a UserWarning, unless the process has issued one for the same reason already.

    Args:
        reason: Short fixed name for the reason, such as "fused_attn_fwd: o_format", without sizes or other values in a
            call, so that the number of reasons is bounded.
        message: The argument without effect, and the reason.
        stacklevel: As in `warnings.warn`, counted from this function; 3 is the caller of the calling function.
    """
    if reason not in _issued:
        _issued.add(reason)
        warnings.warn(message, UserWarning, stacklevel=stacklevel)


def forget_issued() -> None:
    """Clear the record of issued warnings, so that each is issued again; for tests."""
    _issued.clear()


def warn_of_unused() -> None:
    """Warn once about each variable that is set to another value than its default although nothing reads it."""
    if _unused.isdisjoint(os.environ):
        return
    for name in sorted(_unused.intersection(os.environ) - _warned):
        row = env.variable(name)
        try:
            differs = row.parse(os.environ[name]) != row.default
        except ValueError:
            differs = True
        if differs:
            _warned.add(name)
            reason = row.meaning.removeprefix(_PREFIX)
            warnings.warn(
                f"{name}={os.environ[name]!r} has no effect: {reason}", UserWarning, stacklevel=3
            )
