"""Enumerations of NVIDIA's headers, whose numbers pickles and callers compare; versions and build features."""

from __future__ import annotations

import enum

import torch

from transformer_engine.common.enums import (
    NVTE_Bias_Type,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)
from transformer_engine.pytorch.attention.dot_product_attention.utils import NVTE_Fused_Attn_Backend
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.primitives.gemm import cublaslt_library

__all__ = [
    "CommOverlapAlgo",
    "CommOverlapType",
    "DType",
    "FP8BwdTensors",
    "FP8FwdTensors",
    "Float8BlockScaleTensorFormat",
    "NVTEQBHistogramMode",
    "NVTEScalingMode",
    "NVTE_Bias_Type",
    "NVTE_Fused_Attn_Backend",
    "NVTE_Mask_Type",
    "NVTE_QKV_Format",
    "NVTE_QKV_Layout",
    "NVTE_Softmax_Type",
    "device_supports_multicast",
    "get_cublasLt_version",
    "get_cudnn_version",
    "get_grouped_gemm_setup_workspace_size",
    "get_num_cublas_streams",
    "get_stream_priority_range",
    "nvte_built_with_cublasmp",
    "ubuf_built_with_mpi",
]


class FP8FwdTensors(enum.IntEnum):
    """Slots in a module's forward scaling state: three per product."""

    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5
    GEMM3_INPUT = 6
    GEMM3_WEIGHT = 7
    GEMM3_OUTPUT = 8


class FP8BwdTensors(enum.IntEnum):
    """Slots in a module's backward scaling state: two per product."""

    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
    GRAD_OUTPUT3 = 4
    GRAD_INPUT3 = 5


class Float8BlockScaleTensorFormat(enum.IntEnum):
    """Scale order for FP8 tensors in blocks of 128; tensors here are GEMM_READY."""

    GEMM_READY = 0
    COMPACT = 1
    INVALID = 2


class CommOverlapType(enum.IntEnum):
    """Collective that NVIDIA's engine overlaps with a product."""

    RS = 0
    AG = 1


class CommOverlapAlgo(enum.IntEnum):
    """Schedule by which NVIDIA's engine overlaps a collective with a product."""

    BULK_OVERLAP_AG = 0
    BULK_OVERLAP_RS = 1
    SPLIT_PIPELINED_AG_P2P = 2
    SPLIT_PIPELINED_RS = 3
    SPLIT_PIPELINED_RS_P2P = 4
    ATOMIC_GEMM_RS = 5
    ATOMIC_GEMM_AG_P2P = 6
    ATOMIC_GEMM_RS_P2P = 7
    EXTERNAL_BULK_OVERLAP_AG = 8


class NVTEQBHistogramMode(enum.IntEnum):
    """Algorithm that counts the quantile-balancing histogram; both count the same."""

    TWO_KERNEL = 0
    FUSED_ATOMIC = 1


class NVTEScalingMode(enum.IntEnum):
    """Scale granularity: one per tensor, or one per block of 32, 128 or 16 elements."""

    NVTE_DELAYED_TENSOR_SCALING = 0
    NVTE_MXFP8_1D_SCALING = 1
    NVTE_BLOCK_SCALING_1D = 2
    NVTE_BLOCK_SCALING_2D = 3
    NVTE_NVFP4_1D_SCALING = 4
    NVTE_INVALID_SCALING = 100


def get_cudnn_version() -> int:
    """Return cuDNN's version as a number, 91900 for 9.19.0; 0 if torch has no cuDNN."""
    return torch.backends.cudnn.version() or 0


def device_supports_multicast(device_id: int = -1) -> bool:
    """Return False: userbuffers over multicast memory are unsupported.

    Args:
        device_id: Has no effect.
    """
    return False


def ubuf_built_with_mpi() -> bool:
    """Return False: userbuffers are unsupported."""
    return False


def nvte_built_with_cublasmp() -> bool:
    """Return False: products over several GPUs use torch products and collectives."""
    return False


def get_cublasLt_version() -> int:
    """Return cuBLASLt's version as a number, 130100 for 13.1.0; 0 without the library."""
    return (
        cublaslt_library.bindings().get_version()
        if cublaslt_library.unavailable_reason() is None
        else 0
    )


def get_num_cublas_streams() -> int:
    """Number of streams in a grouped product: 1, because the current stream runs all groups."""
    return 1


def get_grouped_gemm_setup_workspace_size(num_tensors: int) -> int:
    """Return 0: a grouped product needs no workspace from the caller.

    Args:
        num_tensors: Has no effect.
    """
    return 0


def get_stream_priority_range(device_id: int = -1) -> tuple[int, int]:
    """Lowest and highest stream priority, (0, 0) without a GPU; smaller numbers go first.

    Args:
        device_id: Has no effect: torch reports the current device's range.
    """
    return torch.cuda.Stream.priority_range() if torch.cuda.is_available() else (0, 0)  # pyright: ignore[reportCallIssue]
