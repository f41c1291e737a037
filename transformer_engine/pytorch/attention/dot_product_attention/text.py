"""text = as_text(request), request = from_text(text): a request as a constant that a tracing compiler takes."""

from __future__ import annotations

import ast
import functools
from dataclasses import fields

import torch

from .mask import Mask
from .request import AttentionRequest, Switches


def as_text(request: AttentionRequest) -> str:
    """The request as a Python literal, one item a field; score_mod, which is code, is not in it."""
    mask, switches = request.mask, request.switches
    parts = []
    for name in _FIELDS:
        value = getattr(request, name)
        parts.append(f"{str(value)!r}" if name == "dtype" else f"{value!r}")
    parts.append(f"({mask.name!r}, {mask.window!r}, {mask.bottom_right!r})")
    parts.append("(" + "".join(f"{getattr(switches, name)!r}, " for name in _SWITCHES) + ")")
    return "(" + ", ".join(parts) + ")"


_SWITCHES = tuple(field.name for field in fields(Switches))
_FIELDS = tuple(
    field.name for field in fields(AttentionRequest) if field.name not in ("mask", "switches", "score_mod")
)


@functools.lru_cache(maxsize=256)
def from_text(text: str) -> AttentionRequest:
    """The request that as_text wrote."""
    *values, mask, switches = ast.literal_eval(text)
    given = dict(zip(_FIELDS, values, strict=True))
    given["dtype"] = getattr(torch, given["dtype"].removeprefix("torch."))
    return AttentionRequest(**given, mask=Mask(*mask), switches=Switches(*switches))
