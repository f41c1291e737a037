"""Quantized tensor payloads outside torch.Tensor: the class in each file is a name in this package."""

from .float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage
from .float8_tensor_storage import Float8TensorStorage
from .grouped_tensor_storage import GroupedTensorStorage
from .hybrid_tensor_storage import HybridQuantizedTensorStorage
from .identity_tensor_storage import IdentityTensorStorage
from .mxfp8_tensor_storage import MXFP8TensorStorage
from .nvfp4_tensor_storage import NVFP4TensorStorage
from .quantized_tensor_storage import QuantizedTensorStorage

__all__ = [
    "Float8BlockwiseQTensorStorage",
    "Float8TensorStorage",
    "GroupedTensorStorage",
    "HybridQuantizedTensorStorage",
    "IdentityTensorStorage",
    "MXFP8TensorStorage",
    "NVFP4TensorStorage",
    "QuantizedTensorStorage",
]
