"""The operations under the public functions, by the names that code which reaches below them uses ("tex")."""

from ..collective import CollectiveOp, CollectiveOpSet, collective_gemm_bootstrap, noop_collective_op_set
from ..primitives.topk import topk
from .activation import act_lu, dact_lu
from .gemm import gemm, grouped_gemm
from .misc import is_softmax_kernel_available
from .normalization import layernorm_fwd, rmsnorm_fwd
from .quantization import grouped_quantize, quantize, quantize_dbias

__all__ = [
    "CollectiveOp",
    "CollectiveOpSet",
    "act_lu",
    "collective_gemm_bootstrap",
    "dact_lu",
    "gemm",
    "grouped_gemm",
    "grouped_quantize",
    "is_softmax_kernel_available",
    "layernorm_fwd",
    "noop_collective_op_set",
    "quantize",
    "quantize_dbias",
    "rmsnorm_fwd",
    "topk",
]
