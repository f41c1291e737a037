"""module.float(), .half() and .bfloat16() keep quantized parameters quantized: only their nominal dtype changes.

`tensor.float()` of a quantized tensor dequantizes, and torch's modules convert parameters through that method. So
these three methods of torch.nn.Module are replaced by ones that behave the same for every other tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor, nn

from .quantized_tensor import QuantizedTensor

_MARK = "_keeps_quantized_parameters"


def _conversion(
    dtype: torch.dtype, original: Callable[[nn.Module], nn.Module]
) -> Callable[[nn.Module], nn.Module]:
    @wraps(original)
    def convert(self: nn.Module) -> nn.Module:
        if not any(isinstance(tensor, QuantizedTensor) for tensor in self.parameters()):
            return original(self)
        return self._apply(lambda tensor: _converted(tensor, dtype))

    setattr(convert, _MARK, True)
    return convert


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype=dtype) if tensor.is_floating_point() else tensor


def keep_quantized_parameters() -> None:
    """Replace the three methods, once."""
    for name, dtype in (("float", torch.float32), ("half", torch.float16), ("bfloat16", torch.bfloat16)):
        original = getattr(nn.Module, name)
        if not hasattr(original, _MARK):
            setattr(nn.Module, name, _conversion(dtype, original))
