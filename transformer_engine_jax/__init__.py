"""transformer_engine_jax: enumerations and queries of the machine, under the names of NVIDIA's extension."""

from transformer_engine.common import absent

from . import members
from .attention import get_fused_attn_backend, nvte_get_qkv_format
from .enums import (
    DType,
    JAXX_Collective_Op,
    JAXX_Quantize_Layout,
    JAXX_Routing_Map_Format,
    JAXX_Scaling_Mode,
    JAXX_Score_Function,
    NVTE_Activation_Type,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_Norm_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)
from .machine import (
    get_cgemm_num_max_streams,
    get_cublasLt_version,
    get_cuda_version,
    get_cudnn_frontend_version,
    get_cudnn_version,
    get_device_compute_capability,
    get_num_compute_streams,
    is_collective_gemm_with_cublasmp,
    nvte_built_with_cublasmp,
    registrations,
)
from .members import *  # noqa: F403 - by the list in __all__

__all__ = [
    "DType",
    "JAXX_Collective_Op",
    "JAXX_Quantize_Layout",
    "JAXX_Routing_Map_Format",
    "JAXX_Scaling_Mode",
    "JAXX_Score_Function",
    "NVTE_Activation_Type",
    "NVTE_Bias_Type",
    "NVTE_Fused_Attn_Backend",
    "NVTE_Mask_Type",
    "NVTE_Norm_Type",
    "NVTE_QKV_Format",
    "NVTE_QKV_Layout",
    "NVTE_Softmax_Type",
    "get_cgemm_num_max_streams",
    "get_cublasLt_version",
    "get_cuda_version",
    "get_cudnn_frontend_version",
    "get_cudnn_version",
    "get_device_compute_capability",
    "get_fused_attn_backend",
    "get_num_compute_streams",
    "is_collective_gemm_with_cublasmp",
    "nvte_built_with_cublasmp",
    "nvte_get_qkv_format",
    "registrations",
]

__all__ += members.__all__

absent.install_getters(__name__)
