"""Quantizers, and the tensors they make."""

from __future__ import annotations

import torch

from ..constants import DType
from ..primitives.operand import COLUMNWISE, ROWWISE
from . import formats, grouped_tensor
from .formats import *  # noqa: F403 - by the list in its __all__
from .grouped_tensor import GroupedTensor, GroupedTensorStorage
from .module_parameters import keep_quantized_parameters
from .quantized_tensor import (
    QuantizedTensor,
    QuantizedTensorStorage,
    _rebuild_trained,
    get_storage,
    prepare_for_saving,
    restore_from_func_ctx,
    restore_from_saved,
)
from .quantizer import Calibrating, Quantizer
from .storage.quantized_tensor_storage import Rebuild
from .utils import (
    cast_master_weights_to_fp8,
    post_all_gather_processing,
    quantize_master_weights,
    replace_raw_data,
)

__all__ = [
    "COLUMNWISE",
    "ROWWISE",
    "Calibrating",
    "GroupedTensor",
    "GroupedTensorStorage",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "cast_master_weights_to_fp8",
    "get_storage",
    "post_all_gather_processing",
    "prepare_for_saving",
    "quantize_master_weights",
    "replace_raw_data",
    "restore_from_func_ctx",
    "restore_from_saved",
]
__all__ += formats.__all__

keep_quantized_parameters()

# Names in checkpoints of quantized tensors: torch.load(weights_only=True) builds no other objects.
torch.serialization.add_safe_globals(
    [
        DType,
        Rebuild,
        _rebuild_trained,
        GroupedTensor,
        *(getattr(formats, name) for name in formats.__all__),
        *(function for module in (*formats.MODULES, grouped_tensor) for function in module.PICKLED),
    ]
)
