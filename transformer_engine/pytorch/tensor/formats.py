"""Quantizers and containers for every format: the names in `__all__` of each `<format>_tensor.py`.

The list is written out for type checkers. `MODULES` also has the functions that container pickles call.
"""

from . import (
    float8_blockwise_tensor,
    float8_tensor,
    hybrid_tensor,
    identity_tensor,
    mxfp8_tensor,
    nvfp4_tensor,
)
from .float8_blockwise_tensor import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
)
from .float8_tensor import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    Float8TensorStorage,
)
from .hybrid_tensor import (
    HybridQuantizedTensor,
    HybridQuantizedTensorStorage,
    HybridQuantizer,
)
from .identity_tensor import (
    IdentityQuantizer,
    IdentityTensor,
    IdentityTensorStorage,
)
from .mxfp8_tensor import (
    MXFP8Quantizer,
    MXFP8Tensor,
    MXFP8TensorStorage,
)
from .nvfp4_tensor import (
    NVFP4Quantizer,
    NVFP4Tensor,
    NVFP4TensorStorage,
)

__all__ = [
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "HybridQuantizer",
    "IdentityQuantizer",
    "IdentityTensor",
    "IdentityTensorStorage",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
]

MODULES = (
    float8_blockwise_tensor,
    float8_tensor,
    hybrid_tensor,
    identity_tensor,
    mxfp8_tensor,
    nvfp4_tensor,
)
