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

F = TypeVar("F", bound=Callable)
_unsafe_view = torch.ops.aten._unsafe_view.default


class _ExportMode(threading.local):
    """Whether layers of this thread compute in operators that ONNX can express; `te.onnx_export` sets `onnx`."""

    onnx = False


export_mode = _ExportMode()


def run_eagerly(reason: str) -> Callable[[F], F]:
    """Decorate a function that ends a compiled graph and runs in eager mode, without importing the compiler.

    Args:
        reason: Why a graph cannot contain the function, for the compiler's messages.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                torch._dynamo.graph_break(msg=reason)
                return torch.compiler.disable(function)(*args, **kwargs)
            return function(*args, **kwargs)

        return cast(F, run)

    return decorate


@contextmanager
def hidden_from_selective_checkpoints() -> Iterator[bool]:
    """Hide operators from selective checkpoints; yields whether one is active.

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
    """Issue a DeprecationWarning at the caller of the function with that name; none while a compiler traces."""
    if not torch.compiler.is_compiling():
        warnings.warn(f"{name} is deprecated; use {instead}", DeprecationWarning, stacklevel=3)


def result_as(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Return y in a dtype, for autograd function results; while a compiler traces, always a distinct tensor.

    torch 2.11 loses the gradient for a traced function's result that it knows under two names, as
    it would y if the dtype is y's.
    """
    return y.to(dtype, copy=torch.compiler.is_compiling())


def reshape_result(y: Tensor, shape: Sequence[int]) -> Tensor:
    """Return y in another shape, for autograd function results: not a view for autograd, because y is not one.

    A view that is created within an autograd function cannot be written in place. The result shares y's memory but not
    its version counter: everything else that saves y must save the result instead. A compiler tracks views by itself.
    """
    if torch.compiler.is_compiling():
        return y.view(shape)
    return _unsafe_view(y, shape)


@constant_while_tracing
def number_while_tracing(text: str) -> float:
    """Return the number from a `float.hex` text.

    In a graph with dynamic shapes a float is a symbol, on which no choice can depend.
    """
    return float.fromhex(text)


def specialized(value: Any) -> Any:
    """Return the number of a symbol, for which the compiler then specializes the graph; other values unchanged.

    For settings that decide how a graph is built, such as a softcap or recipe fields. Eager mode
    returns every value unchanged.

    Raises:
        TypeError: The value is a tensor, whose number is unknown while a compiler traces.
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
    """Return the tensors with views for repeated ones: Dynamo traces no autograd function with a repeated tensor."""
    distinct: list[Tensor | None] = []
    for x in tensors:
        repeated = any(x is other for other in distinct)
        distinct.append(x.view_as(x) if x is not None and repeated else x)
    return distinct
