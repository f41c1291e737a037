"""transformer_engine.pytorch.ops: operations that fuse when they run one after another.

A `Sequential` of operations is one differentiable function per chain of operations. Casts move into the kernels that
make their inputs, biases into products, additions into accumulation.
"""

from __future__ import annotations

from .basic import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    AddExtraInput,
    AllGather,
    AllReduce,
    BasicLinear,
    Bias,
    ClampedSwiGLU,
    ConstantScale,
    Dropout,
    GroupedLinear,
    Identity,
    L2Normalization,
    LayerNorm,
    MakeExtraOutput,
    Quantize,
    ReduceScatter,
    ReGLU,
    ReLU,
    Reshape,
    RMSNorm,
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    ScaledTanhSReLU,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from .fused import (
    BackwardActivationBias,
    BackwardAddRMSNorm,
    BackwardLinearAdd,
    BackwardLinearScale,
    ForwardLinearBiasActivation,
    ForwardLinearBiasAdd,
    ForwardLinearScaleAdd,
    UserbuffersBackwardLinear,
    UserbuffersForwardLinear,
)
from .fuser import (
    OperationFuser,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
from .linear import Linear
from .operation import BasicOperation, FusedOperation, FusibleOperation, OperationContext
from .sequential import Sequential

__all__ = [name for name in globals() if not name.startswith("_") and name != "annotations"]
