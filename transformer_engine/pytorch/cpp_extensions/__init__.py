"""Every transformer_engine_torch name, with wrappers that take names instead of numbers."""

import transformer_engine_torch as _extension
from transformer_engine_torch import *  # noqa: F403

from ...common import absent
from .fused_attn import fused_attn_bwd as fused_attn_bwd
from .fused_attn import fused_attn_fwd as fused_attn_fwd
from .gemm import general_gemm, general_grouped_gemm, general_grouped_gemm_for_grouped_tensor

__all__ = ["general_gemm", "general_grouped_gemm", "general_grouped_gemm_for_grouped_tensor"]
__all__ += _extension.__all__

absent.install_getters(__name__)
