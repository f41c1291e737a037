"""First values of a parameter: where init methods write them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime.device import canonical_device
from ..tensor.quantized_tensor import QuantizedTensor


def empty_like(param: Tensor) -> Tensor:
    """Where init methods write: the parameter's own storage, or a fresh high-precision tensor."""
    if isinstance(param, QuantizedTensor):
        return torch.empty(param.shape, dtype=param.dtype, device=param.device)
    if param.is_meta:
        return torch.empty_like(param, device=canonical_device("cuda"), requires_grad=False)
    return param
