"""LayerNorm: y = (x - E[x]) / sqrt(Var[x] + eps) * gamma + beta."""

from __future__ import annotations

from ..ops.basic import LayerNorm as Operation
from .normalization import Normalization


class LayerNorm(Normalization, Operation):
    """y = (x - E[x]) / sqrt(Var[x] + eps) * gamma + beta over the last dimensions (arXiv:1607.06450).

    Args:
        normalized_shape: The last dimensions of the input; an int means one dimension.
        zero_centered_gamma: Use gamma = 1 + weight, with the weight initialized to 0.
        sequence_parallel: Set as an attribute of the parameters, which Megatron-LM reads.
        sm_margin: Streaming multiprocessors to leave free: an int, or a dict by stage
            ("forward", "backward", "inference").
    """
