"""Parameters under the keywords of earlier releases."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def accepts_former_keywords(**renamed: str) -> Callable[[Function], Function]:
    """Decorate a function that also accepts parameters under former keywords.

    Args:
        **renamed: {former keyword: name of the parameter}. The signature has the present names only.

    Raises:
        TypeError: A call of the decorated function passes a parameter under both keywords.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def with_present_keywords(*arguments: Any, **options: Any) -> Any:
            for former in renamed.keys() & options.keys():
                present = renamed[former]
                if present in options:
                    raise TypeError(
                        f"{function.__name__}() got {present} and {former}, its former name; pass {present} only"
                    )
                options[present] = options.pop(former)
            return function(*arguments, **options)

        return with_present_keywords  # pyright: ignore[reportReturnType]

    return decorate
