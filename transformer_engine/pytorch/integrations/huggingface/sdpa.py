"""with replaced(function): in this thread, torch's scaled_dot_product_attention is a function of the caller's.

torch.nn.functional's name is exchanged while any thread is inside, for one function that looks at what its own thread
has asked for, and put back when the last one leaves. A compiler is given a TorchFunctionMode instead, which it resolves
while tracing.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

Function = Callable[..., Any]
TORCH_SDPA: Function = F.scaled_dot_product_attention
_lock = threading.Lock()


class _Asked(threading.local):
    """The function of each thread; None: torch's own."""

    function: Function | None = None


class _Exchanged:
    """How many threads are inside, and what the name stood for before the first of them came."""

    inside = 0
    before: Function = TORCH_SDPA


_asked, _exchanged = _Asked(), _Exchanged()


def _of_this_thread(*args: Any, **kwargs: Any) -> Any:
    return (_asked.function or _exchanged.before)(*args, **kwargs)


class replaced:  # noqa: N801 - reads as a verb where it is used
    """The context; a function that calls torch's attention itself takes `TORCH_SDPA`."""

    def __init__(self, function: Function) -> None:
        self.function, self.outer = function, None

    def __enter__(self) -> None:
        with _lock:
            if not _exchanged.inside:
                _exchanged.before = F.scaled_dot_product_attention
                F.scaled_dot_product_attention = _of_this_thread
            _exchanged.inside += 1
        self.outer, _asked.function = _asked.function, self.function

    def __exit__(self, *_: object) -> None:
        _asked.function = self.outer
        with _lock:
            _exchanged.inside -= 1
            if not _exchanged.inside and F.scaled_dot_product_attention is _of_this_thread:
                F.scaled_dot_product_attention = _exchanged.before


class traced(TorchFunctionMode):  # noqa: N801
    """The same for a compiler."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self.function if func is TORCH_SDPA else func)(*args, **(kwargs or {}))


def original() -> Function:
    """What the name stands for outside of every context."""
    return _exchanged.before if _exchanged.inside else F.scaled_dot_product_attention


def imported_by_name(module: torch.nn.Module) -> str | None:
    """The name under which the module's file has imported torch's attention, which an exchange does not reach."""
    for owner in type(module).__mro__:
        if owner.__module__.startswith("torch.nn"):
            continue
        for name, value in vars(sys.modules.get(owner.__module__, object)).items():
            if value is TORCH_SDPA:
                return f"{owner.__module__}.{name}"
    return None

