"""y = apply(*args): apply an autograd function in less host time than its own `apply`.

`Function.apply` checks in every call whether the function has a `setup_context`, which no function here has, and
unwraps its arguments with a generator. Without both, a warm forward and backward pass takes 2 to 4 percent less host
time: Linear 137 us instead of 140, LayerNormMLP 183 us instead of 190 (bfloat16, `benchmarks/pretended_gpu.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

_transforms_are_active = torch._C._are_functorch_transforms_active
_unwrapped = torch._C._functorch.unwrap_if_dead  # pyright: ignore[reportAttributeAccessIssue]


def applier(function: type[Function]) -> Callable[..., Any]:
    """Return a faster function.apply; compilers and the transforms of functorch get function.apply itself."""
    node: Any = super(Function, function).apply  # pyright: ignore[reportAttributeAccessIssue]

    def apply(*args: Any) -> Any:
        if torch.compiler.is_compiling() or _transforms_are_active():
            return function.apply(*args)
        return node(*[_unwrapped(value) if isinstance(value, Tensor) else value for value in args])

    return apply
