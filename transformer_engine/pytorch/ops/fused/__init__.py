"""Fused operations that the fusion functions of this package insert, under the original's names.

Each represents consecutive basic operations. It contributes their steps, and the rules of passes merge these steps, so
the classes are what clients inspect in `_forward_ops` and `_backward_ops`.
"""

from .grouped_mlp import GroupedMLP_CuTeGEMMGLU, GroupedMLP_CuTeGEMMUnary
from .operations import (
    BackwardActivationBias,
    BackwardAddRMSNorm,
    BackwardLinearAdd,
    BackwardLinearScale,
    ForwardLinearBiasActivation,
    ForwardLinearBiasAdd,
    ForwardLinearScaleAdd,
    UserbuffersBackwardLinear,
    UserbuffersForwardLinear,
    register_fusions,
)

register_fusions()

__all__ = [
    "BackwardActivationBias",
    "BackwardAddRMSNorm",
    "BackwardLinearAdd",
    "BackwardLinearScale",
    "ForwardLinearBiasActivation",
    "ForwardLinearBiasAdd",
    "ForwardLinearScaleAdd",
    "GroupedMLP_CuTeGEMMGLU",
    "GroupedMLP_CuTeGEMMUnary",
    "UserbuffersBackwardLinear",
    "UserbuffersForwardLinear",
]
