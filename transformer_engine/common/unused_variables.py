"""Warnings about environment variables of the original that are set but have no effect here."""

from __future__ import annotations

import os
import warnings

from . import env

# Variables whose purpose is met without them: a fusion or an autotuner that does not exist is switched off, a pool that
# does not exist is sized, or the computation needs no permission.
_MET = frozenset(
    """
    NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE NVTE_APPLY_QK_LAYER_SCALING NVTE_UnfusedDPA_Emulate_FP8 NVTE_TORCH_COMPILE
    NVTE_BIAS_DROPOUT_FUSION NVTE_CUTLASS_GROUPED_GEMM_WARN_FALLBACK NVTE_FRAMEWORK NVTE_PROJECT_BUILDING
    NVTE_DISABLE_TRITON_AUTOTUNING NVTE_USE_PYTORCH_TRITON NVTE_DISABLE_NVRTC NVTE_UB_WITH_MPI
    NVTE_JAX_ENFORCE_V2_GROUPED_GEMM NVTE_EP_HANDLE_CACHE_SIZE NVTE_TENSOR_HANDLE_POOL_SIZE_MB
    NVTE_GROUPED_TENSOR_HANDLE_POOL_SIZE_MB NVTE_RADIX_TOPK_THRESHOLD NVTE_ONNX_KVCACHE_MAX_SEQ_LEN
    """.split()  # noqa: SIM905 - a quoted name counts as one that the code reads
)
_PREFIX = "Accepted; "
_unused = frozenset(
    row.name for row in env.VARIABLES.values() if row.meaning.startswith(_PREFIX) and row.name not in _MET
)
_warned: set[str] = set()


def warn_of_unused() -> None:
    """Warn once about each variable that is set to another value than its default although nothing reads it."""
    if _unused.isdisjoint(os.environ):
        return
    for name in sorted(_unused.intersection(os.environ) - _warned):
        if _asks_for_an_effect(name):
            _warned.add(name)
            reason = env.variable(name).meaning.removeprefix(_PREFIX)
            warnings.warn(f"{name}={os.environ[name]!r} has no effect: {reason}", UserWarning, stacklevel=3)


def _asks_for_an_effect(name: str) -> bool:
    row = env.variable(name)
    try:
        return row.parse(os.environ[name]) != row.default
    except ValueError:
        return True
