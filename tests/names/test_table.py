"""docs/names.csv, the public names of the original, is a true account of how each name stands."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.clients.walk_surface import SURFACE
from transformer_engine.common import absent

pytest.importorskip("jax")
pytest.importorskip("flax")
DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def table() -> ModuleType:
    """The script that writes the table."""
    sys.path.insert(0, str(DOCS))
    try:
        spec = importlib.util.spec_from_file_location("names_table", DOCS / "names_table.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["names_table"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(DOCS))
    return module


def kind(value: object) -> str:
    if isinstance(value, ModuleType):
        return "module"
    if isinstance(value, type):
        return "class"
    return "function" if callable(value) else "value"


def test_the_file_states_the_status_of_each_name(table):
    stale = [(row, table.status(row.name)) for row in table.listed() if table.status(row.name) != row.status]
    assert not stale, f"run python docs/names_table.py: {stale}"


def test_names_are_listed_once_in_order(table):
    names = [row.name for row in table.listed()]
    assert names == sorted(set(names))
    assert len(names) > 1000


def test_a_served_name_has_its_kind(table):
    wrong = [
        (row.name, row.kind, kind(table.resolved(row.name)))
        for row in table.listed()
        if row.status == "served" and kind(table.resolved(row.name)) != row.kind
    ]
    assert not wrong


def test_an_absent_name_has_a_reason_and_a_replacement(table):
    missing = [
        row.name for row in table.listed() if row.status == "absent" and absent._find_reason(row.name) is None
    ]
    assert not missing


def test_used_names_are_served(table):
    used = [row for row in table.listed() if row.source in table.USED]
    served = [row for row in used if row.status == "served"]
    assert len(used) > 300 and len(served) >= 0.97 * len(used)


# Names of 1.x releases, or of the clients' own modules.
OF_OTHERS = {
    "transformer_engine.pytorch.available",
    "transformer_engine.pytorch.cpp_extensions.cast_to_fp8",
    "transformer_engine.pytorch.module.layernorm_linear._og_LayerNormLinear",
    "transformer_engine.pytorch.module.layernorm_linear.tex",
}


@pytest.mark.parametrize("client", json.loads(SURFACE.read_text()))
def test_every_name_that_a_client_imports_is_listed(table, client):
    """bionemo-llm, megatron-bridge and the other clients of tests/clients/client_surface.json."""
    listed = {row.name for row in table.listed()} | OF_OTHERS
    imported = json.loads(SURFACE.read_text())[client]["names"]
    begins = tuple(f"{name}." for name in OF_OTHERS)
    assert [name for name in imported if name not in listed and not name.startswith(begins)] == []


@pytest.mark.parametrize("weight", ["A", "B"])
def test_names_of_the_release_for_users_are_served(table, weight):
    rows = [row for row in table.listed() if row.weight == weight]
    assert rows and [row.name for row in rows if row.status != "served"] == []


def test_names_of_the_release_for_authors_of_extensions_are_served(table):
    rows = [row for row in table.listed() if row.weight == "C"]
    served = [row for row in rows if row.status == "served"]
    assert len(rows) > 70 and len(served) >= 0.95 * len(rows)


def test_parameters_have_the_form_of_the_signatures(table):
    text = table.parameters_text(
        [["a", "POSITIONAL_OR_KEYWORD", None], ["b", "POSITIONAL_OR_KEYWORD", "1"], ["rest", "VAR_POSITIONAL", None],
         ["c", "KEYWORD_ONLY", "None"], ["d", "KEYWORD_ONLY", "..."], ["others", "VAR_KEYWORD", None]]
    )  # fmt: skip
    assert text == "a, b=1, *rest, c=None, d, **others"
    assert table.parameters_text([["a", "KEYWORD_ONLY", None]]) == "*, a"


def test_an_installed_original_adds_its_names_and_differences(table, tmp_path, capsys):
    package = tmp_path / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "pytorch" / "__init__.py").write_text(
        "def brand_new(a, b=1):\n    pass\n\n\ndef checkpoint(function, other=None):\n    pass\n\n\n_private = 1\n"
        "class Linear:\n"
        "    def __init__(self, in_features, out_features): pass\n"
        "    def forward(self, inp, first=None): pass\n"
        "    @classmethod\n    def made(cls, x): pass\n"
    )
    (package / "broken.py").write_text("raise RuntimeError('no library')\n")
    found = table.installed(tmp_path)
    assert "transformer_engine.broken: no library" in capsys.readouterr().err
    forward = "transformer_engine.pytorch.Linear.forward"
    assert found[forward][0] == "method" and [p[0] for p in found[forward][1]] == ["self", "inp", "first"]
    assert table.absent_methods(found) == ["transformer_engine.pytorch.Linear.made"]
    assert found["transformer_engine.pytorch.brand_new"] == [
        "function", [["a", "POSITIONAL_OR_KEYWORD", None], ["b", "POSITIONAL_OR_KEYWORD", "1"]]
    ]  # fmt: skip
    rows = {row.name: row for row in table.with_installed(table.listed(), found)}
    assert rows["transformer_engine.pytorch.brand_new"].source == "installed"
    assert "transformer_engine.pytorch._private" not in found and len(rows) > len(table.listed())
    assert not any(name.startswith("transformer_engine.pytorch.Linear.") for name in rows)
    method, line = table.signature_differences(found).values()
    assert method.startswith(f"{forward}[2]: ['first', 'POSITIONAL_OR_KEYWORD', 'None']")
    assert line.startswith(
        "transformer_engine.pytorch.checkpoint[1]: ['other', 'POSITIONAL_OR_KEYWORD', 'None']"
    )
    text = table.SIGNATURES.read_text()
    rows = json.loads(table.signature_rows(text, found, table.signature_differences(found)))
    assert rows.pop("transformer_engine.pytorch.checkpoint") == {
        "section": 0, "parameters": "function, other=None"
    }  # fmt: skip
    assert rows.pop(forward) == {"section": 0, "parameters": "self, inp, first=None"}
    assert list(rows) == sorted(rows)
    assert rows == json.loads(text) and table.signature_rows(text, found, []) == text
    with pytest.raises(RuntimeError, match="no public name was found"):
        table.installed(tmp_path / "transformer_engine")
