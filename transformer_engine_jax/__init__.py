"""transformer_engine_jax: enumerations and queries of the machine, by the names of the original's extension module."""

from transformer_engine.common import absent

from .enums import (
    DType,
    JAXX_Collective_Op,
    JAXX_Quantize_Layout,
    JAXX_Routing_Map_Format,
    JAXX_Scaling_Mode,
    JAXX_Score_Function,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)  # fmt: skip
from .machine import get_device_compute_capability, is_collective_gemm_with_cublasmp, nvte_built_with_cublasmp

__all__ = [
    "DType", "JAXX_Collective_Op", "JAXX_Quantize_Layout", "JAXX_Routing_Map_Format", "JAXX_Scaling_Mode",
    "JAXX_Score_Function", "NVTE_Bias_Type", "NVTE_Fused_Attn_Backend", "NVTE_Mask_Type", "NVTE_QKV_Format",
    "NVTE_QKV_Layout", "NVTE_Softmax_Type", "get_device_compute_capability", "is_collective_gemm_with_cublasmp",
    "nvte_built_with_cublasmp",
]  # fmt: skip

absent.answer_in(__name__)
