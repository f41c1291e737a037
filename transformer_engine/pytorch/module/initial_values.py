"""First values of a parameter: where they are written, and how an optimizer gets at them once it is quantized."""

from __future__ import annotations

from types import MethodType

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


def keep_initial_values(param: torch.nn.Parameter, values: Tensor) -> None:
    """Attach accessors of the high-precision initial values, kept on the CPU for an optimizer's master weights."""
    param._high_precision_init_val = values.detach().cpu().clone()  # pyright: ignore[reportAttributeAccessIssue]
    param.get_high_precision_init_val = MethodType(_initial_values, param)  # pyright: ignore
    param.clear_high_precision_init_val = MethodType(_forget_initial_values, param)  # pyright: ignore


def _initial_values(param: Tensor) -> Tensor | None:
    return getattr(param, "_high_precision_init_val", None)


def _forget_initial_values(param: Tensor) -> None:
    vars(param).pop("_high_precision_init_val", None)
