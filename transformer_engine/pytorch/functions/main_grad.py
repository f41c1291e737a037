"""weight.main_grad: the buffer for a fused weight gradient, and its checks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...common.numbers import with_article
from ..distributed_weight import is_distributed_weight

# main_grad dtypes.
_ACCUMULATED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def find_main_grad(parameter: torch.nn.Parameter | None) -> Tensor:
    """Return the buffer for a fused weight gradient; raise AttributeError with the remedy if it is absent."""
    if is_distributed_weight(parameter):
        return parameter.grad_buffer()  # pyright: ignore
    if parameter is not None and hasattr(parameter, "__fsdp_param__"):
        return parameter.get_main_grad()  # pyright: ignore[reportAttributeAccessIssue]
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is None:
        raise AttributeError(
            "fuse_wgrad_accumulation=True, but the weight has no main_grad; set weight.main_grad to a tensor "
            "of the weight's shape (float32 recommended) before the backward pass"
        )
    check_main_grad(parameter, main_grad)
    return main_grad


def check_main_grad(parameter: Any, main_grad: Any) -> None:
    """Raise TypeError or ValueError unless a weight's gradient can be accumulated into a buffer."""
    if not isinstance(main_grad, Tensor):
        raise TypeError(f"weight.main_grad is {with_article(type(main_grad))}; set it to a tensor")
    if main_grad.dtype not in _ACCUMULATED:
        raise TypeError(
            f"weight.main_grad has dtype {main_grad.dtype}, in which gradients cannot be accumulated; use float32, "
            "bfloat16 or float16"
        )
    if main_grad.shape != parameter.shape:
        raise ValueError(
            f"weight.main_grad is {list(main_grad.shape)} and the weight {list(parameter.shape)}; set it to a tensor "
            "of the weight's shape"
        )
    if main_grad.device != parameter.device:
        raise ValueError(
            f"weight.main_grad is on {main_grad.device} and the weight on {parameter.device}; set it to a tensor on "
            "the weight's device"
        )
