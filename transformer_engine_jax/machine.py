"""What this machine is, and what the extension was built with: nothing, since there is none."""

from __future__ import annotations

from transformer_engine.jax.platform import compute_capability


def get_device_compute_capability(gpu_id: int = 0) -> int:
    """Ten times the compute capability of a local GPU; 90 on a CPU."""
    return compute_capability(gpu_id)


def nvte_built_with_cublasmp() -> bool:
    """No: XLA schedules the collectives."""
    return False


def is_collective_gemm_with_cublasmp() -> bool:
    """No, see `nvte_built_with_cublasmp`."""
    return False
