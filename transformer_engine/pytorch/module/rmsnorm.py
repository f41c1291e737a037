"""RMSNorm: y = x / sqrt(E[x²] + eps) * gamma."""

from __future__ import annotations

from .normalization import Normalization


class RMSNorm(Normalization):
    """y = x / sqrt(E[x²] + eps) * gamma over the last dimensions (arXiv:1910.07467).

    normalized_shape      the last dimensions of the input, an int for one
    zero_centered_gamma   gamma = 1 + weight, with the weight initialised to 0
    sequence_parallel     set as an attribute of the parameter, which Megatron-LM reads
    sm_margin             streaming multiprocessors to leave free: an int, or a dict by stage
                          ("forward", "backward", "inference")
    """

    kind = "RMSNorm"
    has_bias = False
