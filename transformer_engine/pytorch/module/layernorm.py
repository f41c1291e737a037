"""LayerNorm: y = (x - E[x]) / sqrt(Var[x] + eps) * gamma + beta."""

from __future__ import annotations

from ..ops.basic import LayerNorm as Operation
from .normalization import Normalization


class LayerNorm(Normalization, Operation):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Compute y = (x - E[x]) / sqrt(Var[x] + eps) * gamma + beta over the last dimensions (arXiv:1607.06450).

    Args:
        normalized_shape: Last input dimensions; an int means one dimension.
        eps: Added to the variance before the square root.
        sequence_parallel: Set as a parameter attribute, which Megatron-LM reads.
        params_dtype: Earlier name for dtype.
        zero_centered_gamma: Use gamma = 1 + weight, with the weight initialized to 0.
        hidden_size: Earlier name for normalized_shape.
        device: Parameter device, "cuda" by default.
        dtype: Parameter dtype, by default `torch.get_default_dtype()`.
        sm_margin: Accepted for compatibility: an int, or a dict by stage ("forward", "backward", "inference").
            Kernels use all multiprocessors, and a value other than 0 warns.

    Example:
        >>> import torch
        >>> import transformer_engine.pytorch as te
        >>> y = te.LayerNorm(4, device="cpu")(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
        >>> [round(v, 4) for v in y[0].tolist()]
        [-1.3416, -0.4472, 0.4472, 1.3416]
    """
