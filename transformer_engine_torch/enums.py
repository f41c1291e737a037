"""Enumerations of the original's headers, whose numbers pickles and callers compare; versions and build features."""

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

__all__ = [
    "DType",
    "FP8BwdTensors",
    "FP8FwdTensors",
    "NVTE_Bias_Type",
    "NVTE_Fused_Attn_Backend",
    "NVTE_Mask_Type",
    "NVTE_QKV_Format",
    "NVTE_QKV_Layout",
    "NVTE_Softmax_Type",
]


class FP8FwdTensors(enum.IntEnum):
    """Slots of a module's forward scaling state: three a product."""

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
    """Slots of a module's backward scaling state: two a product."""

    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
    GRAD_OUTPUT3 = 4
    GRAD_INPUT3 = 5


def get_cudnn_version() -> int:
    """Return cuDNN's version as a number, 91900 for 9.19.0; 0 if torch has no cuDNN."""
    return torch.backends.cudnn.version() or 0


def device_supports_multicast(device_id: int = -1) -> bool:
    """Return False: userbuffers over multicast memory are unsupported."""
    return False


def ubuf_built_with_mpi() -> bool:
    """Return False: userbuffers are unsupported."""
    return False
