"""The operations under the public functions, by the names that code which reaches below them uses ("tex")."""

from ..collective import CollectiveOp, CollectiveOpSet, collective_gemm_bootstrap, noop_collective_op_set
from .activation import act_lu, dact_lu, quantize_dact_dbias
from .attention import FusedAttnHelper, make_fused_attn_score_mod_config
from .base import BasePrimitive, register_primitive
from .gemm import gemm, grouped_gemm, grouped_gemm_copy_group_sizes
from .misc import is_softmax_kernel_available
from .normalization import layernorm_fwd, rmsnorm_fwd
from .quantization import grouped_quantize, quantize, quantize_dbias
from .topk import topk

__all__ = [
    "BasePrimitive",
    "CollectiveOp",
    "CollectiveOpSet",
    "FusedAttnHelper",
    "act_lu",
    "collective_gemm_bootstrap",
    "dact_lu",
    "gemm",
    "grouped_gemm",
    "grouped_gemm_copy_group_sizes",
    "grouped_quantize",
    "is_softmax_kernel_available",
    "layernorm_fwd",
    "make_fused_attn_score_mod_config",
    "noop_collective_op_set",
    "quantize",
    "quantize_dact_dbias",
    "quantize_dbias",
    "register_primitive",
    "rmsnorm_fwd",
    "topk",
]
