"""Every engine name in the clients' source exists, or has a reason in the list below."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

from tests.clients.walk_surface import SURFACE

CLIENTS: dict[str, Any] = json.loads(SURFACE.read_text())

# Prefixes for absent names, and why no client needs them.
ABSENT = {
    "transformer_engine.pytorch.cpp_extensions.cast_to_fp8": "asked for below version 2.0 only",
    "transformer_engine.pytorch.module.layernorm_linear._og_LayerNormLinear": "made by nvidia-modelopt itself",
    "transformer_engine.pytorch.module.layernorm_linear.tex": "asked for below version 2.0 only",
    "transformer_engine.pytorch.ops": "operations of a fusing Sequential are not implemented: see docs/support.md",
    "transformer_engine.pytorch.available": "of physicsnemo's own wrapper of the import",
}
PRESENT_ALL_THE_SAME = {
    "transformer_engine.pytorch.ops.BasicLinear",
    "transformer_engine.pytorch.ops.BasicLinear._functional_backward",
    "transformer_engine.pytorch.ops.BasicLinear._functional_forward",
    "transformer_engine.pytorch.ops.BasicOperation",
    "transformer_engine.pytorch.ops.FusibleOperation",
    "transformer_engine.pytorch.ops.op",
    "transformer_engine.pytorch.ops.op.BasicOperation",
    "transformer_engine.pytorch.ops.op.BasicOperation.set_extra_state",
    "transformer_engine.pytorch.ops",
}


def resolve_name(name: str) -> Any:
    """The object of a dotted name: its longest beginning that is a module, then attributes."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            result = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            result = getattr(result, part)
        return result
    raise ModuleNotFoundError(name)


def absent(name: str) -> bool:
    if name in PRESENT_ALL_THE_SAME:
        return False
    return any(name == start or name.startswith(f"{start}.") for start in ABSENT)


@pytest.mark.parametrize("client", CLIENTS)
def test_every_name_of_a_client_exists(client):
    missing = []
    for name in CLIENTS[client]["names"]:
        if absent(name):
            continue
        try:
            resolve_name(name)
        except (AttributeError, ModuleNotFoundError) as error:
            missing.append(f"{name}: {error}")
    assert missing == []


def test_every_listed_absence_is_used_by_a_client():
    names = {name for client in CLIENTS.values() for name in client["names"]}
    for start in ABSENT:
        assert any(name == start or name.startswith(f"{start}.") for name in names), start


def test_names_listed_as_absent_do_not_exist():
    """An entry must be removed once its name exists."""
    for start in ABSENT:
        if start in PRESENT_ALL_THE_SAME:
            continue
        with pytest.raises((AttributeError, ModuleNotFoundError)):
            resolve_name(start)
