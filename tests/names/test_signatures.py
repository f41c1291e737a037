"""Signatures of the original's callables (docs/signatures.json): names, order, kinds, defaults and positions."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from tests.names.test_table import table as table  # the fixture

SIGNATURES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).resolve().parents[2] / "docs" / "signatures.json").read_text()
)
_KINDS = inspect.Parameter


def parse_parameters(text: str) -> list[inspect.Parameter]:
    """Parameters of a text such as "a, b=1, *, c=None"."""
    arguments = ast.parse(f"def f({text}): pass").body[0].args  # pyright: ignore[reportAttributeAccessIssue]
    results = []
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults
    for kind, names, values in (
        (_KINDS.POSITIONAL_OR_KEYWORD, arguments.args, defaults),
        (_KINDS.KEYWORD_ONLY, arguments.kwonlyargs, arguments.kw_defaults),
    ):
        for argument, value in zip(names, values, strict=True):
            default = _KINDS.empty if value is None else ast.literal_eval(value)
            results.append(inspect.Parameter(argument.arg, kind, default=default))
    if arguments.kwarg is not None:
        results.append(inspect.Parameter(arguments.kwarg.arg, _KINDS.VAR_KEYWORD))
    return results


def plain(default: Any) -> Any:
    """A default as the file writes it: the value of a member of an enumeration."""
    return default.value if isinstance(default, enum.Enum) else default


def differences(callable_: Any, row: dict[str, Any]) -> list[str]:
    """Differences of a callable's signature from a row of the file.

    A parameter without default may have one here, as more calls are then accepted. Further parameters have defaults and
    are behind the row's.
    """
    local = inspect.signature(callable_).parameters
    positional = [name for name, p in local.items() if p.kind is not _KINDS.KEYWORD_ONLY]
    wrong = []
    for index, expected in enumerate(
        parse_parameters(row.get("parameters", "")), row.get("from", 0)
    ):
        actual = local.get(expected.name)
        if actual is None:
            wrong.append(f"{expected.name} is missing")
            continue
        if actual.kind is not expected.kind:
            wrong.append(
                f"{expected.name} is {actual.kind.description}, not {expected.kind.description}"
            )
        elif (
            expected.kind is _KINDS.POSITIONAL_OR_KEYWORD
            and positional.index(expected.name) != index
        ):
            wrong.append(f"{expected.name} is at {positional.index(expected.name)}, not at {index}")
        if expected.default is not _KINDS.empty and plain(actual.default) != expected.default:
            wrong.append(f"{expected.name}={actual.default!r}, not {expected.default!r}")
    for expected in parse_parameters(f"*, {row['keywords']}" if "keywords" in row else ""):
        if expected.name not in local or plain(local[expected.name].default) != expected.default:
            wrong.append(f"{expected.name}={expected.default!r} is missing")
    return wrong


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_callable_has_the_parameters_of_the_original(name, table):
    assert differences(table.resolve_name(name), SIGNATURES[name]) == []


def test_further_parameters_have_defaults(table):
    for name, row in SIGNATURES.items():
        if "from" in row or "keywords" in row:
            continue
        listed = {parameter.name for parameter in parse_parameters(row["parameters"])}
        local = inspect.signature(table.resolve_name(name)).parameters
        last = row["parameters"].rpartition(",")[2]
        if "=" in last or "*" in row["parameters"]:  # the row is complete
            extra = [p for p in local.values() if p.name not in listed and p.default is p.empty]
            assert [p for p in extra if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)] == [], name


def test_differences_are_found():
    def function(a, b=1, *, c=2):
        return a, b, c

    assert differences(function, {"parameters": "a, b=1, *, c=2"}) == []
    assert differences(function, {"parameters": "b, a"}) == [
        "b is at 1, not at 0",
        "a is at 0, not at 1",
    ]
    assert differences(function, {"parameters": "a, b=2, c=2, d=3"}) == [
        "b=1, not 2",
        "c is keyword-only, not positional or keyword",
        "d is missing",
    ]
    assert differences(function, {"from": 1, "parameters": "b=1"}) == []


def test_modules_of_rows_exist():
    for name in SIGNATURES:
        importlib.import_module(name.split(".")[0])
