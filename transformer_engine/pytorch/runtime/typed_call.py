"""The type of a module's `__call__`, which torch declares as `Callable[..., Any]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Module = TypeVar("Module")


def call_of(
    forward: Callable[Concatenate[Module, Parameters], Any],
) -> Callable[[Callable[..., Any]], Callable[Concatenate[Module, Parameters], Any]]:
    """Declare `__call__` with the parameters of `forward`, under `if TYPE_CHECKING`; it is never executed.

    The result remains Any, as in every module of torch. A checker in strict mode rejects `y.sum().backward()` for a
    `Tensor`, because torch's `backward` has no annotations.
    """
    raise AssertionError(f"{forward} is called by torch.nn.Module.__call__")
