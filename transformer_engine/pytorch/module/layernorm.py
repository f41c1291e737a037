"""LayerNorm: y = (x - E[x]) / sqrt(Var[x] + eps) * gamma + beta."""

from __future__ import annotations

from .normalization import Normalization


class LayerNorm(Normalization):
    """y = (x - E[x]) / sqrt(Var[x] + eps) * gamma + beta over the last dimensions (arXiv:1607.06450).

    normalized_shape      the last dimensions of the input, an int for one
    zero_centered_gamma   gamma = 1 + weight, with the weight initialised to 0
    sequence_parallel     set as an attribute of the parameters, which Megatron-LM reads
    sm_margin             streaming multiprocessors to leave free: an int, or a dict by stage
                          ("forward", "backward", "inference")
    """

    kind = "LayerNorm"
    has_bias = True
