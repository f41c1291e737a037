"""Queries of the device, of library versions, and of the build; this package has no compiled extension."""

from __future__ import annotations

from typing import Any

from transformer_engine.jax.runtime.platform import compute_capability, library_version


def get_device_compute_capability(gpu_id: int = 0) -> int:
    """Return ten times the compute capability of a local GPU; 90 on a CPU.

    Args:
        gpu_id: Number of the GPU in this process.
    """
    return compute_capability(gpu_id)


def get_cuda_version() -> int:
    """Return 1000 * major + 10 * minor of the CUDA runtime that XLA uses; 0 without a GPU."""
    return library_version("cuda")


def get_cudnn_version() -> int:
    """Return 10000 * major + 100 * minor + patch of the cuDNN library that XLA uses; 0 without a GPU."""
    return library_version("cudnn")


def get_cublasLt_version() -> int:
    """Return 10000 * major + 100 * minor + patch of the cuBLAS library that XLA uses; 0 without a GPU."""
    return library_version("cublas")


def get_cudnn_frontend_version() -> int:
    """Return 10000 * major + 100 * minor + patch of the package nvidia-cudnn-frontend; 0 if it is not installed."""
    return library_version("cudnn_frontend")


def get_num_compute_streams() -> int:
    """Return the number of streams of a grouped matrix product: 1, since one launch computes all groups."""
    return 1


def get_cgemm_num_max_streams() -> int:
    """Return the number of streams of a product that overlaps with a collective: 1, since XLA schedules both."""
    return 1


def registrations() -> dict[str, Any]:
    """Return a dict of the foreign functions for jax.ffi: empty, since kernels are compiled at run time."""
    return {}


def nvte_built_with_cublasmp() -> bool:
    """Return whether collective products use cuBLASMp: False, since XLA schedules the collectives."""
    return False


def is_collective_gemm_with_cublasmp() -> bool:
    """Return whether cuBLASMp is in use: False, see `nvte_built_with_cublasmp`."""
    return False
