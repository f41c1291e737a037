"""What this machine is, and what the extension was built with: nothing, since there is none."""

from __future__ import annotations

from typing import Any

from transformer_engine.jax.platform import compute_capability, library_version


def get_device_compute_capability(gpu_id: int = 0) -> int:
    """Ten times the compute capability of a local GPU; 90 on a CPU."""
    return compute_capability(gpu_id)


def get_cuda_version() -> int:
    """1000 major + 10 minor of the CUDA runtime that XLA uses; 0 without a GPU."""
    return library_version("cuda")


def get_cudnn_version() -> int:
    """10000 major + 100 minor + patch of the cuDNN that XLA uses; 0 without a GPU."""
    return library_version("cudnn")


def get_cublasLt_version() -> int:
    """10000 major + 100 minor + patch of the cuBLAS that XLA uses; 0 without a GPU."""
    return library_version("cublas")


def get_cudnn_frontend_version() -> int:
    """10000 major + 100 minor + patch of the Python package nvidia-cudnn-frontend; 0 where it is not installed."""
    return library_version("cudnn_frontend")


def get_num_compute_streams() -> int:
    """Streams that a grouped product is spread over: one, since all groups are one launch."""
    return 1


def get_cgemm_num_max_streams() -> int:
    """Streams of a product that overlaps with its collective: one, since XLA schedules both."""
    return 1


def registrations() -> dict[str, Any]:
    """{name: foreign function} for jax.ffi: none, since nothing here is compiled ahead of time."""
    return {}


def nvte_built_with_cublasmp() -> bool:
    """No: XLA schedules the collectives."""
    return False


def is_collective_gemm_with_cublasmp() -> bool:
    """No, see `nvte_built_with_cublasmp`."""
    return False
