"""Enumerations under the names of NVIDIA's extension module."""

from __future__ import annotations

import enum

from transformer_engine.common.enums import (
    DType,
    NVTE_Bias_Type,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)

__all__ = [
    "DType",
    "JAXX_Collective_Op",
    "JAXX_Quantize_Layout",
    "JAXX_Routing_Map_Format",
    "JAXX_Scaling_Mode",
    "JAXX_Score_Function",
    "NVTE_Bias_Type",
    "NVTE_Fused_Attn_Backend",
    "NVTE_Mask_Type",
    "NVTE_QKV_Format",
    "NVTE_QKV_Layout",
    "NVTE_Softmax_Type",
]


class NVTE_Activation_Type(enum.IntEnum):
    """Activations. The gated ones (GLU in the name) multiply by a second, linear half; GLU's gate is a sigmoid."""

    GELU = 0
    GEGLU = 1
    GLU = 2
    SILU = 3
    SWIGLU = 4
    RELU = 5
    REGLU = 6
    QGELU = 7
    QGEGLU = 8
    SRELU = 9
    SREGLU = 10
    CLAMPED_SWIGLU = 11


class NVTE_Norm_Type(enum.IntEnum):
    """Types of norms."""

    LayerNorm = 0
    RMSNorm = 1


class NVTE_Fused_Attn_Backend(enum.IntEnum):
    """Kinds of fused attention backends."""

    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


JAXX_Scaling_Mode = enum.IntEnum(
    "JAXX_Scaling_Mode",
    "NO_SCALING DELAYED_TENSOR_SCALING MXFP8_1D_SCALING CURRENT_TENSOR_SCALING NVFP4_1D_SCALING NVFP4_2D_SCALING",
    start=0,
    module=__name__,
)
"""Scalings of a quantized array: scaling in one direction of blocks (1D) or square blocks (2D)."""
JAXX_Quantize_Layout = enum.IntEnum(
    "JAXX_Quantize_Layout", "ROWWISE COLWISE ROWWISE_COLWISE", start=0, module=__name__
)
"""Directions of a quantized array: for products along its last axis, along its other axes, or both."""
JAXX_Score_Function = enum.IntEnum(
    "JAXX_Score_Function", "SIGMOID SOFTMAX SQRTSOFTPLUS", start=0, module=__name__
)
"""Functions from the logits of a router to its scores."""
JAXX_Routing_Map_Format = enum.IntEnum(
    "JAXX_Routing_Map_Format", "BYTEMAP BITMAP_U8", start=0, module=__name__
)
"""Layouts of a routing map: a byte per token and expert, or a bit."""
JAXX_Collective_Op = enum.IntEnum(
    "JAXX_Collective_Op", "NONE ALL_GATHER REDUCE_SCATTER", start=0, module=__name__
)
"""Collectives that a product of a sharded array may be combined with."""
