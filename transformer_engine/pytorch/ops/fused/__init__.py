"""Fused operations that the fusion functions of this package insert, under the original's names.

Each represents consecutive basic operations and runs their passes; `passes/patterns.py` lists what kernels compute
together. The classes are what clients inspect in `_forward_ops` and `_backward_ops`.
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
