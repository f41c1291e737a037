"""RMSNorm: y = x / sqrt(E[x²] + eps) * gamma."""

from __future__ import annotations

from ..ops.basic import RMSNorm as Operation
from .normalization import Normalization, margin_property


class RMSNorm(Normalization, Operation):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Compute y = x / sqrt(E[x²] + eps) * gamma over the last dimensions (arXiv:1910.07467).

    Args:
        normalized_shape: Last input dimensions; an int means one dimension.
        eps: Added to the mean square before the square root.
        sequence_parallel: Set as a parameter attribute, which Megatron-LM reads.
        params_dtype: Earlier name for dtype.
        zero_centered_gamma: Use gamma = 1 + weight, with the weight initialized to 0.
        hidden_size: Earlier name for normalized_shape.
        device: Parameter device, "cuda" by default.
        dtype: Parameter dtype, by default `torch.get_default_dtype()`.
        sm_margin: Accepted for compatibility: an int, or a dict by stage ("forward", "backward", "inference").
            Kernels use all multiprocessors, and a value other than 0 warns. The attributes `fwd_rmsnorm_sm_margin`,
            `bwd_rmsnorm_sm_margin` and `inf_rmsnorm_sm_margin` read and set one stage.

    Example:
        >>> import torch
        >>> import transformer_engine.pytorch as te
        >>> y = te.RMSNorm(4, device="cpu")(torch.tensor([[1.0, 1.0, 1.0, -1.0]]))
        >>> [round(v, 4) for v in y[0].tolist()]
        [1.0, 1.0, 1.0, -1.0]
    """

    fwd_rmsnorm_sm_margin = margin_property("forward")
    bwd_rmsnorm_sm_margin = margin_property("backward")
    inf_rmsnorm_sm_margin = margin_property("inference")
