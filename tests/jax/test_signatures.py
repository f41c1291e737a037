"""Every public name has the parameters, defaults, members or value that public_names.txt lists."""

from __future__ import annotations

import enum
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TABLE = Path(__file__).with_name("public_names.txt").read_text().splitlines()
OF_EVERY_MODULE = ("parent", "name")
REJECTED_KEYWORDS = "others"  # keywords from other frameworks and releases, which raise a TypeError


def format_default(value: Any) -> str:
    """Format a default as the table does: the repr for numbers and strings, otherwise the name."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return (
            f"({', '.join(format_default(item) for item in value)}{',' if len(value) == 1 else ''})"
        )
    if value is None or isinstance(value, (int, float, str)):
        return repr(value)
    if type(value).__name__ in ("QuantizerSet", "CollectiveOpSet"):
        return "noop"
    return getattr(value, "__name__", str(value))


def parameters(result: Any) -> Iterator[str]:
    """Yield "x", "y=default", "*" and "z" for the parameters of a function or a dataclass."""
    keyword_only = False
    of_flax = OF_EVERY_MODULE if inspect.isclass(result) and hasattr(result, "apply") else ()
    for parameter in inspect.signature(result).parameters.values():
        if parameter.name in (REJECTED_KEYWORDS, *of_flax):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            yield "*"
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = (
            "" if parameter.default is parameter.empty else f"={format_default(parameter.default)}"
        )
        yield f"{stars}{parameter.name}{default}"


def read_description(result: Any) -> str:
    """Return the text that follows a name in the table."""
    if isinstance(result, enum.Enum):
        return f": {type(result).__name__}={result.value!r}"
    if inspect.ismodule(result):
        return ": module"
    if getattr(result, "__module__", "").endswith(".ad_checkpoint"):
        return ": policy of jax.checkpoint"  # a function or a callable object, depending on the jax version
    if isinstance(result, enum.EnumType):
        return ": " + " ".join(f"{member.name}={format_default(member.value)}" for member in result)
    if inspect.isroutine(result) or (
        inspect.isclass(result) and hasattr(result, "__dataclass_fields__")
    ):
        return f"({', '.join(parameters(result))})"
    if inspect.isclass(result):
        return ": class"
    if isinstance(result, (str, int)):
        return f" = {result!r}"
    return f": {type(result).__name__}"


@pytest.mark.parametrize("line", TABLE)
def test_a_public_name_has_the_signature_of_the_table(line):
    """Each table line is module:name and a description."""
    module, _, rest = line.partition(":")
    path = f"{module}:{rest.partition('(')[0].partition(':')[0].partition(' ')[0]}"
    assert path + read_description(pkgutil.resolve_name(path)) == line
