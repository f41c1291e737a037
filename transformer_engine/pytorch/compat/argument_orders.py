"""Signatures of `forward`: positional calls in an earlier release's argument order, and the type of `__call__`.

Releases have inserted arguments in the middle of a signature, or moved them. A call by position in
an older order is recognized by its argument types: a softcap cannot be `True`, and a diagonal's
alignment cannot be a string. A call that fits the present order is never reordered.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar, cast, get_origin

import torch
from torch import Tensor

from .. import constants
from ..runtime.warn_once import warn_once

Function = TypeVar("Function", bound=Callable[..., Any])
Parameters = ParamSpec("Parameters")
Module = TypeVar("Module")
Result = TypeVar("Result")
Test = Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return not isinstance(value, (bool, str)) and hasattr(value, "__float__")


def _is_integer(value: Any) -> bool:
    return not isinstance(value, (bool, str)) and hasattr(value, "__index__")


def _is_object(value: Any) -> bool:
    return not isinstance(value, (bool, int, float, str))


# Annotations that name a closed set of strings, such as "AttentionType".
_LITERALS = [name for name, value in vars(constants).items() if get_origin(value) is Literal]
# Whether a value fits an annotation; all others are objects, such as process groups.
_TESTS: dict[str, Test] = {
    "bool": lambda value: isinstance(value, bool),
    "int": _is_integer,
    "float": _is_number,
    "str": lambda value: isinstance(value, str),
    "None": lambda value: value is None,
    "Tensor": lambda value: isinstance(value, Tensor),
    "tuple": lambda value: isinstance(value, (tuple, list)),
    "list": lambda value: isinstance(value, (tuple, list)),
    "Callable": callable,
    "Sequence": lambda value: isinstance(value, (tuple, list)),
    "torch.dtype": lambda value: isinstance(value, torch.dtype),
    "Any": _is_object,
    **dict.fromkeys(_LITERALS, lambda value: isinstance(value, str)),
    "torch.device": lambda value: _is_object(value) and not isinstance(value, Tensor),
}


class _Order(NamedTuple):
    """An argument order: the release that had it last, the names, and the argument type tests.

    Attributes:
        release: Last release with this order.
        names: Argument names in this order.
        tests: Tests of the argument types that recognize the order.
    """

    release: str
    names: tuple[str, ...]
    tests: tuple[tuple[Test, ...], ...]

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the arguments have the types in this order, and none is passed twice."""
        if len(args) > len(self.names) or not kwargs.keys().isdisjoint(self.names[: len(args)]):
            return False
        return all(
            any(test(value) for test in tests)
            for value, tests in zip(args, self.tests, strict=False)
        )


def _make_tests(annotation: str) -> tuple[Test, ...]:
    """Return tests for the alternatives in an annotation such as "tuple[int, int] | None"."""
    depth, parts = 0, [""]
    for character in annotation:
        depth += (character == "[") - (character == "]")
        if character == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return tuple(_make_test(part.strip()) for part in parts)


def _make_test(alternative: str) -> Test:
    """Return the test for one alternative in an annotation, such as "int" or 'Literal["a", "b"]'."""
    name, _, rest = alternative.partition("[")
    if name == "Literal":
        allowed = ast.literal_eval(f"({rest.removesuffix(']')},)")
        return lambda value: isinstance(value, str) and value in allowed
    return _TESTS.get(name, _is_object)


def accepts_older_orders(
    **inserted: tuple[str | tuple[str, int], ...],
) -> Callable[[Function], Function]:
    """Decorate a method or function: accept positional calls in older argument orders.

    An older order applies if the arguments do not fit the present order by type and fit the older
    one. The first such call per order warns.

    Args:
        inserted: By release, newest first, the differences between the release's order and the present one
            ("2.19" is `v2_19`): a name that the order lacks, or (a name, its position there).
    """

    def decorate(function: Function) -> Function:
        parameters = list(inspect.signature(function).parameters.values())
        is_method = parameters[0].name == "self"
        parameters = [p for p in parameters[is_method:] if p.kind is p.POSITIONAL_OR_KEYWORD]
        names = tuple(parameter.name for parameter in parameters)
        tests = {parameter.name: _make_tests(str(parameter.annotation)) for parameter in parameters}

        def order(release: str, changes: tuple[str | tuple[str, int], ...]) -> _Order:
            renamed = dict(change for change in changes if isinstance(change, tuple))
            remaining = [name for name in names if name not in changes and name not in renamed]
            for name, position in renamed.items():
                remaining.insert(position, name)
            return _Order(release, tuple(remaining), tuple(tests[name] for name in remaining))

        present = order("", ())
        older = [
            order(release.removeprefix("v").replace("_", "."), changes)
            for release, changes in inserted.items()
        ]
        # Shorter calls are the same in every order.
        shared = min(
            next(i for i, name in enumerate(names) if candidate.names[i : i + 1] != (name,))
            for candidate in older
        )
        call: Callable[..., Any] = function
        if not is_method:
            call = lambda _, *args, **kwargs: function(*args, **kwargs)  # noqa: E731

        @functools.wraps(function)
        def reordered(self: Any, *args: Any, **kwargs: Any) -> Any:
            if len(args) > shared and not present.fits(args, kwargs):
                for candidate in older:
                    if candidate.fits(args, kwargs):
                        warn_once(
                            f"{function.__qualname__} in the order of {candidate.release}",
                            f"{function.__qualname__} is called by position in the argument order of release "
                            f"{candidate.release}; pass the arguments from {names[shared]!r} on by keyword",
                        )
                        return call(
                            self, **dict(zip(candidate.names, args, strict=False)), **kwargs
                        )
            return call(self, *args, **kwargs)

        if is_method:
            return cast(Function, reordered)

        @functools.wraps(function)
        def function_order(*args: Any, **kwargs: Any) -> Any:
            return reordered(None, *args, **kwargs)

        return cast(Function, function_order)

    return decorate


def declare_call(
    forward: Callable[Concatenate[Module, Parameters], Any],
) -> Callable[[Callable[..., Any]], Callable[Concatenate[Module, Parameters], Tensor]]:
    """Declare `__call__` with the parameters of `forward`, under `if TYPE_CHECKING`; it is never executed.

    The result is a Tensor, which is also iterable: `y, bias = layer(x)` for a layer with `return_bias=True` passes.
    """
    raise AssertionError(f"torch.nn.Module.__call__ calls {forward}")


def exact_call_of(
    forward: Callable[Concatenate[Module, Parameters], Result],
) -> Callable[[Callable[..., Any]], Callable[Concatenate[Module, Parameters], Result]]:
    """Declare `__call__` as `declare_call` does, with the `forward` result."""
    raise AssertionError(f"torch.nn.Module.__call__ calls {forward}")
