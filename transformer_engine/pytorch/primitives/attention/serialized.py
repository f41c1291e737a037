"""text = as_text(request), request = from_text(text): a request as a constant that a tracing compiler takes."""

from __future__ import annotations

import ast
import functools
from dataclasses import fields
from typing import Any

import torch

from .mask import Mask
from .request import AttentionRequest, Device, Options, Shape, Switches

_RECORDS = ("shape", Shape), ("options", Options), ("device", Device)
# Parts that are no literals, written field by field, and those that are not written at all.
_NESTED = {"mask": Mask, "switches": Switches}
_LEFT_OUT = ("score_mod",)


def _names(record: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(record) if field.name not in _LEFT_OUT)


_FIELDS = {record: _names(record) for record in (Shape, Options, Device, *_NESTED.values())}


def as_text(request: AttentionRequest) -> str:
    """The request as a Python literal, one item a field; score_mod, which is code, is not in it."""
    return _written([_literal(getattr(request, name), record) for name, record in _RECORDS])


def _literal(value: Any, record: Any) -> str:
    items = []
    for name in _FIELDS[record]:
        item = getattr(value, name)
        if name in _NESTED:
            items.append(_literal(item, _NESTED[name]))
        else:
            items.append(f"{str(item)!r}" if name == "dtype" else f"{item!r}")
    return _written(items)


def _written(items: list[str]) -> str:
    return "(" + "".join(f"{item}, " for item in items) + ")"


@functools.lru_cache(maxsize=256)
def from_text(text: str) -> AttentionRequest:
    """The request that as_text wrote."""
    parts = zip(ast.literal_eval(text), _RECORDS, strict=True)
    return AttentionRequest(*(_read(values, record) for values, (_, record) in parts))


def _read(values: tuple[Any, ...], record: Any) -> Any:
    given: dict[str, Any] = dict(zip(_FIELDS[record], values, strict=True))
    for name, nested in _NESTED.items():
        if name in given:
            given[name] = _read(given[name], nested)
    if "dtype" in given:
        given["dtype"] = getattr(torch, given["dtype"].removeprefix("torch."))
    return record(**given)
