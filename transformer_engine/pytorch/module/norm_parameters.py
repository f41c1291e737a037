"""layer_norm_weight and layer_norm_bias of the layers that begin with a norm."""

from __future__ import annotations

import torch

from .base import TransformerEngineBaseModule
from .parameters import ParameterInit


def register_norm_parameters(
    module: TransformerEngineBaseModule,
    features: int,
    normalization: str,
    zero_centered: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """gamma [features] starts so that it multiplies by one; beta [features], zeros, for LayerNorm only."""
    gamma = torch.nn.Parameter(torch.empty(features, dtype=dtype, device=device))
    fill = torch.nn.init.zeros_ if zero_centered else torch.nn.init.ones_
    module.register_parameter("layer_norm_weight", gamma, ParameterInit(fill))
    gamma.sequence_parallel = module.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
    if normalization == "RMSNorm":
        module.register_parameter("layer_norm_bias", None)
        return
    beta = torch.nn.Parameter(torch.empty(features, dtype=dtype, device=device))
    module.register_parameter("layer_norm_bias", beta, ParameterInit(torch.nn.init.zeros_))
    beta.sequence_parallel = module.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
