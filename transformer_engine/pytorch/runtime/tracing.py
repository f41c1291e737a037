"""Differences between eager mode, tracing by torch.compile, and export to ONNX."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode, _push_mode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from ...common.tracing import constant_while_tracing

_F = TypeVar("_F", bound=Callable)
_unsafe_view = torch.ops.aten._unsafe_view.default


class _ExportMode(threading.local):
    """Thread-local flag: layers use only operators that ONNX supports. `te.onnx_export` sets `onnx`."""

    onnx = False


export_mode = _ExportMode()


def run_eagerly(reason: str) -> Callable[[_F], _F]:
    """Decorate a function to run in eager mode, with a graph break in compiled code.

    Unlike `torch.compiler.disable`, decorating does not import Dynamo.

    Args:
        reason: Why a graph cannot contain the function, for the compiler's messages.
    """

    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                torch._dynamo.graph_break(msg=reason)
                return torch.compiler.disable(function)(*args, **kwargs)
            return function(*args, **kwargs)

        return cast(_F, run)

    return decorate


@contextmanager
def hide_from_selective_checkpoints() -> Iterator[bool]:
    """Hide operators from selective checkpoints; yield whether a selective checkpoint is active.

    Selective checkpointing matches operators between a function's two runs by their order.
    Operators on state that only one run copies or updates would shift that order.
    """
    hidden: list[Any] = []
    while isinstance(
        _get_current_dispatch_mode(), (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
    ):
        hidden.append(_pop_mode())
    try:
        yield bool(hidden)
    finally:
        for mode in reversed(hidden):
            _push_mode(mode)


def warn_deprecated(name: str, instead: str) -> None:
    """Issue a DeprecationWarning at the caller of the function with that name, except while torch.compile traces."""
    if not torch.compiler.is_compiling():
        warnings.warn(f"{name} is deprecated; use {instead}", DeprecationWarning, stacklevel=3)


def cast_result(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast the result y of an autograd function; while torch.compile traces, always to a copy.

    In torch 2.11, a traced autograd function that returns the same tensor under two names loses its gradient. Without
    the copy, y itself would be returned if it has the dtype already.
    """
    return y.to(dtype, copy=torch.compiler.is_compiling())


def reshape_result(y: Tensor, shape: Sequence[int]) -> Tensor:
    """Reshape the result y of an autograd function, without making it a view for autograd.

    A view that is created within an autograd function cannot be written in place. The reshaped tensor shares y's memory
    but not its version counter: the function must save the reshaped tensor, not y.
    """
    return _unsafe_view(y, shape)


@constant_while_tracing
def float_constant(hex_text: str) -> float:
    """Return the number of a `float.hex` text as a graph constant.

    With dynamic shapes, a float argument is symbolic, and Python code cannot branch on it.
    """
    return float.fromhex(hex_text)


def specialize(value: Any) -> Any:
    """Guard a symbolic number to its current value and return it; other values are returned unchanged.

    For settings that decide how a graph is built, such as a softcap or recipe fields. Eager mode
    returns every value unchanged.

    Raises:
        TypeError: The value is a tensor, whose number is unknown while torch.compile traces.
    """
    if not torch.compiler.is_compiling():
        return value
    if isinstance(value, Tensor):
        raise TypeError(
            "a setting (a field of a recipe, softcap) is a tensor in a compiled function, where its value is unknown; "
            "give a number, or construct the recipe outside of the compiled function"
        )
    if isinstance(value, (bool, int, float)):
        return torch.fx.experimental.symbolic_shapes.guard_scalar(value)  # pyright: ignore[reportAttributeAccessIssue]
    return value


def distinct_tensors(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Replace repeated tensors by views: Dynamo cannot trace an autograd function that receives a tensor twice."""
    distinct: list[Tensor | None] = []
    for x in tensors:
        repeated = any(x is other for other in distinct)
        distinct.append(x.view_as(x) if x is not None and repeated else x)
    return distinct
