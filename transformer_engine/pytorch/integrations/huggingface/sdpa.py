"""with replaced(function): in this thread, torch's scaled_dot_product_attention calls a function from the caller.

torch.nn.functional's attribute is replaced while any thread is in the context, by one function that
calls the function of its thread. The last thread to leave restores the attribute.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.nn import functional as F

Function = Callable[..., Any]
TORCH_SDPA: Function = F.scaled_dot_product_attention
_lock = threading.Lock()


class _ThreadFunction(threading.local):
    """Each thread's function; None: torch's own."""

    function: Function | None = None


class _Exchanged:
    """Thread count in the context, and the attribute's value before the first thread."""

    inside = 0
    before: Function = TORCH_SDPA


_of_thread, _exchanged = _ThreadFunction(), _Exchanged()


def _dispatch_by_thread(*args: Any, **kwargs: Any) -> Any:
    return (_of_thread.function or _exchanged.before)(*args, **kwargs)


class replaced:
    """The context; a function that calls torch's attention itself uses `TORCH_SDPA`."""

    def __init__(self, function: Function) -> None:
        self.function, self.outer = function, None

    def __enter__(self) -> None:
        with _lock:
            if not _exchanged.inside:
                _exchanged.before = F.scaled_dot_product_attention
                F.scaled_dot_product_attention = _dispatch_by_thread
            _exchanged.inside += 1
        self.outer, _of_thread.function = _of_thread.function, self.function

    def __exit__(self, *_: object) -> None:
        _of_thread.function = self.outer
        with _lock:
            _exchanged.inside -= 1
            if not _exchanged.inside and F.scaled_dot_product_attention is _dispatch_by_thread:
                F.scaled_dot_product_attention = _exchanged.before


def traced(function: Function, call: Function, *args: Any, **kwargs: Any) -> Any:
    """Return call(..) with the replacement while a compiler traces, without locks: only the trace sees it."""
    before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = function
    try:
        return call(*args, **kwargs)
    finally:
        F.scaled_dot_product_attention = before


def original() -> Function:
    """Return the attribute's value outside every context."""
    if torch.compiler.is_compiling():
        return TORCH_SDPA
    return _exchanged.before if _exchanged.inside else F.scaled_dot_product_attention


def find_imported_name(module: torch.nn.Module) -> str | None:
    """Return the global name by which the module's file calls torch's attention, bypassing torch.nn.functional."""
    for owner in type(module).__mro__:
        names = vars(sys.modules.get(owner.__module__, object))
        local_functions = [
            f for f in names.values() if getattr(f, "__module__", None) == owner.__module__
        ]
        # The global names that the class's functions, and functions nested in them, read.
        functions = [*vars(owner).values(), *local_functions]
        codes = [f.__code__ for f in functions if isinstance(f, FunctionType)]
        called: set[str] = set()
        while codes:
            code = codes.pop()
            called.update(
                step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"
            )
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        for name, value in names.items():
            if value is TORCH_SDPA and name in called and names is not vars(F):
                return f"{owner.__module__}.{name}"
    return None
