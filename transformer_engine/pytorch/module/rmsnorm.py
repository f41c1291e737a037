"""RMSNorm: y = x / sqrt(E[x²] + eps) * gamma."""

from __future__ import annotations

from ..ops.basic import RMSNorm as Operation
from .normalization import Normalization, margin_of


class RMSNorm(Normalization, Operation):
    """Compute y = x / sqrt(E[x²] + eps) * gamma over the last dimensions (arXiv:1910.07467).

    Args:
        normalized_shape: The last dimensions of the input; an int means one dimension.
        zero_centered_gamma: Use gamma = 1 + weight, with the weight initialized to 0.
        sequence_parallel: Set as an attribute of the parameter, which Megatron-LM reads.
        sm_margin: Streaming multiprocessors to leave free: an int, or a dict by stage
            ("forward", "backward", "inference"). The attributes `fwd_rmsnorm_sm_margin`, `bwd_rmsnorm_sm_margin` and
            `inf_rmsnorm_sm_margin` read and set one stage.
    """

    fwd_rmsnorm_sm_margin = margin_of("forward")
    bwd_rmsnorm_sm_margin = margin_of("backward")
    inf_rmsnorm_sm_margin = margin_of("inference")
