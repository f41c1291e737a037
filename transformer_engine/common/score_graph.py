"""ScoreGraph: pointwise cuDNN graph operations, computed at once by an array library.

A score_mod of NVIDIA's engine builds such a graph: score_mod(graph, score, tensors) -> score. Each operation takes its
operands by position or by the names in cuDNN's frontend (a, b; input0, input1, mask; input, comparison; loss, input),
and returns an array. `name` and `compute_data_type` have no effect.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from .dispatch import is_tracing

# Operand keywords, in operand order.
_OPERANDS = ("a", "b", "loss", "input", "input0", "input1", "comparison", "mask", "bias", "scale")
_WITHOUT_EFFECT = ("name", "compute_data_type")


def _sigmoid(xp: Any, x: Any) -> Any:
    return 1.0 / (1.0 + xp.exp(-x))


OPERATIONS: dict[str, tuple[int, Callable[..., Any]]] = {
    "abs": (1, lambda xp, x: xp.abs(x)),
    "ceil": (1, lambda xp, x: xp.ceil(x)),
    "cos": (1, lambda xp, x: xp.cos(x)),
    "exp": (1, lambda xp, x: xp.exp(x)),
    "floor": (1, lambda xp, x: xp.floor(x)),
    "identity": (1, lambda xp, x: x),
    "log": (1, lambda xp, x: xp.log(x)),
    "logical_not": (1, lambda xp, x: xp.logical_not(x)),
    "neg": (1, lambda xp, x: -x),
    "reciprocal": (1, lambda xp, x: 1.0 / x),
    "relu": (1, lambda xp, x: xp.where(x > 0, x, 0.0)),
    "rsqrt": (1, lambda xp, x: 1.0 / xp.sqrt(x)),
    "sigmoid": (1, _sigmoid),
    "sin": (1, lambda xp, x: xp.sin(x)),
    "softplus": (1, lambda xp, x: xp.where(x > 0, x, 0.0) + xp.log1p(xp.exp(-xp.abs(x)))),
    "sqrt": (1, lambda xp, x: xp.sqrt(x)),
    "swish": (1, lambda xp, x: x * _sigmoid(xp, x)),
    "tan": (1, lambda xp, x: xp.tan(x)),
    "tanh": (1, lambda xp, x: xp.tanh(x)),
    "add": (2, lambda xp, x, y: x + y),
    "bias": (2, lambda xp, x, y: x + y),
    "sub": (2, lambda xp, x, y: x - y),
    "mul": (2, lambda xp, x, y: x * y),
    "scale": (2, lambda xp, x, y: x * y),
    "div": (2, lambda xp, x, y: x / y),
    "mod": (2, lambda xp, x, y: xp.fmod(x, y)),
    "pow": (2, lambda xp, x, y: x**y),
    "max": (2, lambda xp, x, y: xp.where(x >= y, x, y)),
    "min": (2, lambda xp, x, y: xp.where(x <= y, x, y)),
    "add_square": (2, lambda xp, x, y: x + y * y),
    "cmp_eq": (2, lambda xp, x, y: x == y),
    "cmp_neq": (2, lambda xp, x, y: x != y),
    "cmp_gt": (2, lambda xp, x, y: x > y),
    "cmp_ge": (2, lambda xp, x, y: x >= y),
    "cmp_lt": (2, lambda xp, x, y: x < y),
    "cmp_le": (2, lambda xp, x, y: x <= y),
    "logical_and": (2, lambda xp, x, y: xp.logical_and(x, y)),
    "logical_or": (2, lambda xp, x, y: xp.logical_or(x, y)),
    "relu_backward": (2, lambda xp, dy, x: xp.where(x > 0, dy, 0.0)),
    "sigmoid_backward": (2, lambda xp, dy, x: dy * _sigmoid(xp, x) * (1.0 - _sigmoid(xp, x))),
    "tanh_backward": (2, lambda xp, dy, x: dy * (1.0 - xp.tanh(x) * xp.tanh(x))),
    "binary_select": (3, lambda xp, x, y, mask: xp.where(mask, x, y)),
}


class ScoreGraph:
    """The operations in one call to a score_mod.

    Args:
        library: Array library with NumPy's names, torch or jax.numpy.
        places: Batch, head, query and key indices of the scores, which broadcast with them.
    """

    def __init__(self, library: Any, places: Sequence[Any]) -> None:
        self._library = library
        self._places = places

    def gen_index(self, input: Any, axis: int, **ignored: Any) -> Any:
        """Indices of the scores [b, h, q, k] along an axis."""
        _check_keywords("gen_index", ignored)
        return self._places[axis]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in OPERATIONS:
            raise NotImplementedError(
                f"score_mod calls graph.{name}; supported are gen_index, {', '.join(sorted(OPERATIONS))}"
            )
        count, operation = OPERATIONS[name]

        def compute(*operands: Any, **named: Any) -> Any:
            inputs = [*operands, *(named.pop(key) for key in _OPERANDS if key in named)]
            _check_keywords(name, named)
            if len(inputs) != count:
                raise TypeError(f"graph.{name} takes {count} tensors, not {len(inputs)}")
            return operation(self._library, *inputs)

        return compute


def _check_keywords(name: str, keywords: dict[str, Any]) -> None:
    unknown = [key for key in keywords if key not in _WITHOUT_EFFECT]
    if unknown:
        raise NotImplementedError(
            f"graph.{name} does not support {', '.join(unknown)} in a score_mod; leave it out"
        )


# By function object; a function keeps its parameters.
_REQUIRED: WeakKeyDictionary[Callable[..., Any], int | None] = WeakKeyDictionary()


def required_parameters(function: Callable[..., Any]) -> int | None:
    """Count the required positional parameters; None with *args or without a signature.

    The signature is inspected once per function object. A method is inspected once for all its bindings, because
    every attribute access creates another bound method.
    """
    owner = getattr(function, "__func__", function)
    try:
        if owner in _REQUIRED:
            count = _REQUIRED[owner]
        else:
            count = _REQUIRED[owner] = _inspect_function(owner)
    except TypeError:  # an object that cannot be hashed or weakly referenced
        return _inspect_function(function)
    return count if count is None or owner is function else count - 1


def _inspect_function(function: Callable[..., Any]) -> int | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(
        parameter.kind in positional and parameter.default is parameter.empty
        for parameter in parameters
    )


def builds_a_graph(score_mod: Callable[..., Any]) -> bool:
    """Whether a score_mod takes (graph, score, tensors): three required positional parameters.

    A compiler reads a function's code but not its signature, and for a nested function not the defaults either (torch
    2.13). A nested graph function may therefore have one parameter with a default, because an index function has at
    least five parameters.
    """
    if is_tracing() and type(score_mod) is FunctionType:
        code = score_mod.__code__
        nested = bool(code.co_flags & inspect.CO_NESTED)
        required = code.co_argcount - (0 if nested else len(score_mod.__defaults__ or ()))
        return required in ((3, 4) if nested else (3,)) and not code.co_flags & inspect.CO_VARARGS
    return required_parameters(score_mod) == 3
