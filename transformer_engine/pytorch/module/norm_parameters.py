"""layer_norm_weight and layer_norm_bias of the layers that begin with a norm."""

from __future__ import annotations

import torch

from ..functions.normalization import NORMALIZATIONS
from .base import TransformerEngineBaseModule
from .normalization import environment_margins
from .parameters import ParameterInit

_SHORT = {"forward": "fwd", "backward": "bwd", "inference": "inf"}


def check_normalization(normalization: str) -> None:
    """ValueError unless the normalization is known."""
    if normalization not in NORMALIZATIONS:
        raise ValueError(
            f"normalization={normalization!r} is unknown; choose one of {', '.join(NORMALIZATIONS)}"
        )


def register_norm_parameters(
    module: TransformerEngineBaseModule,
    features: int,
    normalization: str,
    zero_centered: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """gamma [features] starts so that it multiplies by one; beta [features], zeros, for LayerNorm only."""
    for stage, margin in environment_margins().items():  # fwd_ln_sm_margin and so on, which callers look for
        setattr(module, f"{_SHORT[stage]}_ln_sm_margin", margin)
    gamma = torch.nn.Parameter(torch.empty(features, dtype=dtype, device=device))
    fill = torch.nn.init.zeros_ if zero_centered else torch.nn.init.ones_
    module.register_parameter("layer_norm_weight", gamma, ParameterInit(fill))
    if normalization == "RMSNorm":
        module.register_parameter("layer_norm_bias", None)
        mark_norm_parameters(module)
        return
    beta = torch.nn.Parameter(torch.empty(features, dtype=dtype, device=device))
    module.register_parameter("layer_norm_bias", beta, ParameterInit(torch.nn.init.zeros_))
    mark_norm_parameters(module)


def mark_norm_parameters(module: TransformerEngineBaseModule) -> None:
    """Say whether gamma's and beta's gradients are to be summed over the ranks of sequence parallelism.

    Again whenever they are reset: a copy of a parameter has no attributes.
    """
    for name in ("layer_norm_weight", "layer_norm_bias"):
        parameter = module._parameters[name]
        if parameter is not None:
            parameter.sequence_parallel = module.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
