"""The operations below the public functions, under NVIDIA's names ("tex")."""

from ..collective import (
    CollectiveOp,
    CollectiveOpSet,
    collective_gemm_bootstrap,
    noop_collective_op_set,
)
from . import ep as ep
from . import flex_attention as flex_attention
from . import misc as misc
from . import router as router
from .activation import act_lu, dact_lu, dact_lu_dbias, quantize_dact_dbias
from .amax import AmaxScope, calculate_amax, calculate_post_rht_amax
from .attention import (
    FusedAttnHelper,
    fused_attn_bwd,
    fused_attn_fwd,
    make_fused_attn_score_mod_config,
)
from .base import BasePrimitive, register_primitive
from .gemm import (
    gemm,
    get_non_contracting_dims,
    grouped_gemm,
    grouped_gemm_copy_group_sizes,
    sanitize_dims,
)
from .normalization import (
    layernorm_bwd,
    layernorm_fwd,
    normalization_bwd,
    normalization_fwd,
    rmsnorm_bwd,
    rmsnorm_fwd,
)
from .quantization import grouped_dbias, grouped_quantize, quantize, quantize_dbias
from .softmax import (
    is_softmax_kernel_available,
    scaled_masked_softmax_bwd,
    scaled_masked_softmax_fwd,
    scaled_softmax_bwd,
    scaled_softmax_fwd,
    scaled_upper_triang_masked_softmax_bwd,
    scaled_upper_triang_masked_softmax_fwd,
)
from .topk import topk

__all__ = [
    "AmaxScope",
    "BasePrimitive",
    "CollectiveOp",
    "CollectiveOpSet",
    "FusedAttnHelper",
    "act_lu",
    "calculate_amax",
    "calculate_post_rht_amax",
    "collective_gemm_bootstrap",
    "dact_lu",
    "dact_lu_dbias",
    "fused_attn_bwd",
    "fused_attn_fwd",
    "gemm",
    "get_non_contracting_dims",
    "grouped_dbias",
    "grouped_gemm",
    "grouped_gemm_copy_group_sizes",
    "grouped_quantize",
    "is_softmax_kernel_available",
    "layernorm_bwd",
    "layernorm_fwd",
    "make_fused_attn_score_mod_config",
    "noop_collective_op_set",
    "normalization_bwd",
    "normalization_fwd",
    "quantize",
    "quantize_dact_dbias",
    "quantize_dbias",
    "register_primitive",
    "rmsnorm_bwd",
    "rmsnorm_fwd",
    "sanitize_dims",
    "scaled_masked_softmax_bwd",
    "scaled_masked_softmax_fwd",
    "scaled_softmax_bwd",
    "scaled_softmax_fwd",
    "scaled_upper_triang_masked_softmax_bwd",
    "scaled_upper_triang_masked_softmax_fwd",
    "topk",
]
