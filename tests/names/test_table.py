"""docs/names.csv, the public names of the original, is a true account of how each name stands."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.clients.walk_surface import SURFACE

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


def test_the_file_states_the_status_of_each_name(table):
    stale = [
        (row, table.status(row.name))
        for row in table.read_rows()
        if table.status(row.name) != row.status
    ]
    assert not stale, f"run python docs/names_table.py: {stale}"


def test_names_are_listed_once_in_order(table):
    names = [row.name for row in table.read_rows()]
    assert names == sorted(set(names))
    assert len(names) > 1000


def test_a_served_name_has_its_kind(table):
    wrong = [
        (row.name, row.kind, table.installed_names.kind(table.resolve_name(row.name)))
        for row in table.read_rows()
        if row.status == "served"
        and table.installed_names.kind(table.resolve_name(row.name)) != row.kind
    ]
    assert not wrong


def test_used_names_are_served(table):
    used = [row for row in table.read_rows() if row.source in table.USED]
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
    listed = {row.name for row in table.read_rows()} | OF_OTHERS
    imported = json.loads(SURFACE.read_text())[client]["names"]
    begins = tuple(f"{name}." for name in OF_OTHERS)
    assert [name for name in imported if name not in listed and not name.startswith(begins)] == []


@pytest.mark.parametrize("weight", ["A", "B"])
def test_names_of_the_release_for_users_are_served(table, weight):
    rows = [row for row in table.read_rows() if row.weight == weight]
    assert rows and [row.name for row in rows if row.status != "served"] == []


def test_names_of_the_release_for_authors_of_extensions_are_served(table):
    rows = [row for row in table.read_rows() if row.weight == "C"]
    served = [row for row in rows if row.status == "served"]
    assert len(rows) > 70 and len(served) >= 0.95 * len(rows)


def test_parameters_have_the_form_of_the_signatures(table):
    text = table.parameters_text(
        [
            ["a", "POSITIONAL_OR_KEYWORD", None],
            ["b", "POSITIONAL_OR_KEYWORD", "1"],
            ["rest", "VAR_POSITIONAL", None],
            ["c", "KEYWORD_ONLY", "None"],
            ["d", "KEYWORD_ONLY", "..."],
            ["others", "VAR_KEYWORD", None],
        ]
    )
    assert text == "a, b=1, *rest, c=None, d, **others"
    assert table.parameters_text([["a", "KEYWORD_ONLY", None]]) == "*, a"


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """A directory with a small package under the name of the original."""
    package = tmp_path / "transformer_engine"
    (package / "pytorch" / "_private").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "pytorch" / "__init__.py").write_text(
        "import enum\n"
        "class Way(enum.IntEnum):\n    FIRST = 0\n"
        "def brand_new(a, b=1):\n    pass\n\n\ndef checkpoint(function, other=None):\n    pass\n\n\n_private = 1\n"
        "def defaults(a, b=float('inf'), c=Way.FIRST, d=(1,)): pass\n"
        "class Linear:\n"
        "    def __init__(self, in_features, out_features): pass\n"
        "    def forward(self, inp, first=None): pass\n"
        "    @classmethod\n    def made(cls, x): pass\n"
    )
    (package / "pytorch" / "_private" / "__init__.py").write_text("def hidden(): pass\n")
    (package / "pytorch" / "_private" / "inside.py").write_text("def hidden(): pass\n")
    (package / "__main__.py").write_text("raise SystemExit(3)\n")
    (package / "broken.py").write_text("raise RuntimeError('no library')\n")
    (package / "needy.py").write_text("import a_library_that_is_not_installed\n")
    return tmp_path


FORWARD = "transformer_engine.pytorch.Linear.forward"


def test_an_installed_original_adds_its_names_and_differences(table, original, capsys):
    result = table.original_names(original, []).found
    assert "transformer_engine.broken: RuntimeError: no library" in capsys.readouterr().err
    assert result[FORWARD][0] == "method" and [p[0] for p in result[FORWARD][1]] == [
        "self",
        "inp",
        "first",
    ]
    assert table.absent_methods(result) == ["transformer_engine.pytorch.Linear.made"]
    assert result["transformer_engine.pytorch.brand_new"] == [
        "function",
        [["a", "POSITIONAL_OR_KEYWORD", None], ["b", "POSITIONAL_OR_KEYWORD", "1"]],
    ]
    rows = {row.name: row for row in table.with_installed(table.read_rows(), result)}
    assert rows["transformer_engine.pytorch.brand_new"].source == "installed"
    assert len(rows) > len(table.read_rows())
    assert not any(name.startswith("transformer_engine.pytorch.Linear.") for name in rows)
    method, line = table.signature_differences(result).values()
    assert method.startswith(f"{FORWARD}[2]: ['first', 'POSITIONAL_OR_KEYWORD', 'None']")
    assert line.startswith(
        "transformer_engine.pytorch.checkpoint[1]: ['other', 'POSITIONAL_OR_KEYWORD', 'None']"
    )
    text = table.SIGNATURES.read_text()
    rows = json.loads(table.signature_rows(text, result, table.signature_differences(result)))
    assert rows.pop("transformer_engine.pytorch.checkpoint") == {
        "section": 0,
        "parameters": "function, other=None",
    }
    assert rows.pop(FORWARD) == {"section": 0, "parameters": "self, inp, first=None"}
    assert list(rows) == sorted(rows)
    assert rows == json.loads(text) and table.signature_rows(text, result, []) == text
    with pytest.raises(RuntimeError, match="no public name was found"):
        table.original_names(original / "transformer_engine", [])


def test_private_modules_of_an_original_are_not_listed(table, original):
    names = table.original_names(original, []).found
    assert "transformer_engine.pytorch.Way" in names
    assert not [name for name in names if any(part.startswith("_") for part in name.split("."))]


def test_defaults_are_written_as_literals(table, original):
    parameters = table.original_names(original, []).found["transformer_engine.pytorch.defaults"][1]
    assert [default for *_, default in parameters] == [None, "...", "0", "..."]


def test_names_that_an_original_has_removed_are_reported(table, original):
    current = [
        "transformer_engine",
        "transformer_engine.pytorch",
        "transformer_engine.pytorch.Linear",
        FORWARD,
    ]
    unknown = [  # of a package or in a module that cannot be imported
        "transformer_engine_jax.anything",
        "transformer_engine.broken.Thing",
        "transformer_engine.needy",
        "transformer_engine.needy.Thing.method",
    ]
    removed = [
        "transformer_engine.common",
        "transformer_engine.common.recipe.Format",
        "transformer_engine.pytorch.gone",
        "transformer_engine.pytorch.Linear.reset",
        "transformer_engine.pytorch.module.linear",
    ]
    assert table.original_names(original, [*current, *unknown, *removed]).removed == removed


@pytest.fixture
def files(table, tmp_path, monkeypatch) -> dict[str, Path]:
    """Copies of the files that the script writes."""
    copies = {}
    (tmp_path / "docs").mkdir()
    for name in ("NAMES", "SIGNATURES", "PAGE"):
        copies[name] = tmp_path / "docs" / getattr(table, name).name
        copies[name].write_text(getattr(table, name).read_text())
        monkeypatch.setattr(table, name, copies[name])
    monkeypatch.setattr(table, "ROOT", tmp_path)
    monkeypatch.setattr(sys.modules["generated"], "ROOT", tmp_path)
    return copies


def run(table, monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["names_table.py", *arguments])
    return table.main()


def test_a_check_writes_no_file(table, files, original, monkeypatch, capsys):
    before = {name: path.read_text() for name, path in files.items()}
    assert run(table, monkeypatch, "--check") == 0
    arguments = ("--original", str(original), "--signatures")
    assert run(table, monkeypatch, "--check", *arguments) == 1
    printed = capsys.readouterr().out
    assert (
        "docs/names.csv is out of date" in printed
        and "docs/signatures.json is out of date" in printed
    )
    assert "transformer_engine.pytorch.Linear.made: absent here" in printed
    assert "transformer_engine.pytorch.optimizers.FusedAdam: the original has removed it" in printed
    assert {name: path.read_text() for name, path in files.items()} == before
    assert run(table, monkeypatch, *arguments) == 0
    assert all(path.read_text() != before[name] for name, path in files.items())
    assert run(table, monkeypatch, "--check", *arguments) == 0
    (row,) = [line for line in files["PAGE"].read_text().splitlines() if table.NO_REASON in line]
    assert "`transformer_engine.pytorch.brand_new`" in row


def test_signatures_without_an_original_are_an_error(table, files, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(table, monkeypatch, "--signatures")
    assert "--signatures needs --original" in capsys.readouterr().err


def test_sections_may_be_empty_numbers_or_words(table):
    rows = [
        table.Name(
            f"transformer_engine.x{number}", "function", "served", "reference", section, weight
        )
        for number, (section, weight) in enumerate(
            [("10", "C"), ("", "A"), ("2", "B"), ("2.21", "A")]
        )
    ]
    sections = [line.split(" | ")[0].strip("| ") for line in table.weights(rows)[2:]]
    assert sections == ["2", "10", "", "2.21"]


def test_sections_of_both_files_have_a_subject(table):
    numbers = {row.section for row in table.read_rows() if row.section}
    numbers |= {str(row["section"]) for row in json.loads(table.SIGNATURES.read_text()).values()}
    assert numbers <= set(table.SECTIONS)


def test_each_absent_name_has_its_reason_in_the_file(table):
    rows = table.read_rows()
    assert [
        row.name for row in rows if bool(row.reason) != (row.status in ("absent", "raises"))
    ] == []
    assert not [row.name for row in rows if row.reason == table.NO_REASON]
