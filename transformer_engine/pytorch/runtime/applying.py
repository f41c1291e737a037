"""y = apply(*args): an autograd function applied with less of the host's time than by its own `apply`.

That asks at every call whether the function has a `setup_context`, which no function here has, and goes through the
arguments by a generator: 2 us of the 12 that a node takes.
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
    """function.apply, which itself is what a compiler and the transforms of functorch get."""
    node: Any = super(Function, function).apply  # pyright: ignore[reportAttributeAccessIssue]

    def apply(*args: Any) -> Any:
        if torch.compiler.is_compiling() or _transforms_are_active():
            return function.apply(*args)
        return node(*[_unwrapped(value) if isinstance(value, Tensor) else value for value in args])

    return apply
