"""Quantizers, and the tensors they make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...common.folder import exports_of, modules_of
from ..constants import DType
from ..primitives.operand import COLS, ROWS
from . import grouped_tensor, quantized_tensor
from .grouped_tensor import GroupedTensor, GroupedTensorStorage
from .module_parameters import keep_quantized_parameters
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

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return a class of a format, from its file."""


# A format is a file here, `<format>_tensor.py`: the names in its __all__ are names of this package, and PICKLED lists
# the functions that its pickles call.
_NO_FORMATS = (grouped_tensor, quantized_tensor)
_FILES = [module for module in modules_of(__name__, __path__, "_tensor") if module not in _NO_FORMATS]
EXPORTS = exports_of(_FILES)
globals().update(EXPORTS)

keep_quantized_parameters()

# The names in checkpoints of quantized tensors: torch.load(weights_only=True) builds no other objects.
torch.serialization.add_safe_globals(
    [
        DType,
        Rebuild,
        _rebuild_trained,
        GroupedTensor,
        *EXPORTS.values(),
        *(made for module in (*_FILES, grouped_tensor) for made in module.PICKLED),
    ]
)
