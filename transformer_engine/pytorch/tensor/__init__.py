"""Quantizers, and the tensors they make."""

import torch

from ..constants import DType
from .axis import COLS, ROWS
from .float8_blockwise_tensor import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
)
from .float8_blockwise_tensor import _make_float8_blockwise_tensor_in_reduce_ex as _make_blockwise
from .float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer, Float8Tensor, Float8TensorStorage
from .float8_tensor import _make_float8_tensor_in_reduce_ex as _make_float8
from .hybrid_tensor import HybridQuantizedTensor, HybridQuantizedTensorStorage, HybridQuantizer
from .hybrid_tensor import _make_hybrid_tensor_in_reduce_ex as _make_hybrid
from .identity_tensor import IdentityQuantizer, IdentityTensor, IdentityTensorStorage
from .identity_tensor import _make_identity_tensor_in_reduce_ex as _make_identity
from .module_conversion import keep_quantized_parameters
from .mxfp8_tensor import MXFP8Quantizer, MXFP8Tensor, MXFP8TensorStorage
from .mxfp8_tensor import _make_mxfp8_tensor_in_reduce_ex as _make_mxfp8
from .nvfp4_tensor import NVFP4Quantizer, NVFP4Tensor, NVFP4TensorStorage
from .nvfp4_tensor import _make_nvfp4_tensor_in_reduce_ex as _make_nvfp4
from .quantized_tensor import (
    QuantizedTensor,
    QuantizedTensorStorage,
    _rebuild_trained,
    prepare_for_saving,
    restore_from_func_ctx,
    restore_from_saved,
    storage_of,
)
from .quantizer import Calibrating, Quantizer
from .storage.quantized_tensor_storage import Rebuild
from .utils import (
    cast_master_weights_to_fp8,
    post_all_gather_processing,
    quantize_master_weights,
    replace_raw_data,
)

keep_quantized_parameters()

# What a checkpoint of quantized tensors names: torch.load(weights_only=True) builds nothing else.
torch.serialization.add_safe_globals(
    [
        DType,
        Float8BlockQuantizer,
        Float8BlockwiseQTensor,
        Float8BlockwiseQTensorStorage,
        Float8CurrentScalingQuantizer,
        Float8Quantizer,
        Float8Tensor,
        Float8TensorStorage,
        HybridQuantizedTensor,
        HybridQuantizedTensorStorage,
        HybridQuantizer,
        IdentityQuantizer,
        IdentityTensor,
        IdentityTensorStorage,
        MXFP8Quantizer,
        MXFP8Tensor,
        MXFP8TensorStorage,
        NVFP4Quantizer,
        NVFP4Tensor,
        NVFP4TensorStorage,
        Rebuild,
        _make_blockwise,
        _make_float8,
        _make_hybrid,
        _make_identity,
        _make_mxfp8,
        _make_nvfp4,
        _rebuild_trained,
    ]
)
