import re
from pathlib import Path

import pytest

from transformer_engine.common import env

PACKAGE = Path(env.__file__).parents[1]


def test_unset_variables_have_their_defaults(monkeypatch):
    for name in env.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert {name: env.get(name) for name in env.VARIABLES} == {
        name: row.default for name, row in env.VARIABLES.items()
    }


@pytest.mark.parametrize("name", env.VARIABLES)
def test_a_default_has_the_type_and_the_value_that_its_row_allows(name):
    row = env.variable(name)
    assert row.default is None or type(row.default) is row.kind
    assert row.choices is None or row.default is None or row.default in row.choices
    assert row.meaning.endswith(".")
    assert row.name.startswith(("NVTE_", "TE_"))


def test_every_variable_is_either_read_somewhere_or_marked_as_accepted():
    source = "".join(
        path.read_text() for path in PACKAGE.rglob("*.py") if path != Path(env.__file__)
    )
    source += Path(env.__file__).read_text().partition("VARIABLES:")[2]
    # A public constant of the original that holds the name of a variable does not read the variable.
    source = re.sub(r'^\w+_ENV = "\w+"$', "", source, flags=re.MULTILINE)
    read = {name for name in env.VARIABLES if f'"{name}"' in source}
    accepted = {name for name, row in env.VARIABLES.items() if row.meaning.startswith("Accepted; ")}
    assert read | accepted == set(env.VARIABLES)
    assert not read & accepted


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", True),
        ("0", False),
        ("true", True),
        ("Off", False),
        ("", False),
        (" yes ", True),
        ("2", True),
        ("-1", True),
        ("00", False),
    ],
)
def test_flags_read_the_usual_spellings(monkeypatch, text, value):
    monkeypatch.setenv("NVTE_FLASH_ATTN", text)
    assert env.get("NVTE_FLASH_ATTN") is value
    assert env.flag("NVTE_FLASH_ATTN") is value


def test_numbers_and_texts_are_typed(monkeypatch):
    monkeypatch.setenv("NVTE_DEBUG_LEVEL", "2")
    monkeypatch.setenv("NVTE_NVFP4_4OVER6", "weights")
    monkeypatch.setenv("NVTE_FRAMEWORK", "pytorch")
    assert env.get("NVTE_DEBUG_LEVEL") == 2
    assert env.get("NVTE_NVFP4_4OVER6") == "weights"
    assert env.get("NVTE_FRAMEWORK") == "pytorch"


def test_a_key_of_variables_changes_with_each_of_them(monkeypatch):
    names = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN")
    watched = [read(name) for name in names for read in (env.watch, env.watch_in_eager_mode)]

    def key() -> tuple[str | bytes | None, ...]:
        return tuple(read() for read in watched)

    for name in names:
        monkeypatch.delenv(name, raising=False)
    keys = [key()]
    for name, text in (
        ("NVTE_FLASH_ATTN", "1"),
        ("NVTE_FLASH_ATTN", "0"),
        ("NVTE_FUSED_ATTN", "0"),
    ):
        monkeypatch.setenv(name, text)
        keys.append(key())
    assert len(set(keys)) == 4
    for name in names:
        monkeypatch.delenv(name)
    assert key() == keys[0]


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("NVTE_FUSED_ATTN", "maybe", "a flag: 0, 1, true, false, yes, no, on or off"),
        ("NVTE_DEBUG_LEVEL", "loud", "an integer"),
        ("NVTE_BACKWARD_OVERRIDE", "low", "'high_precision', 'dequantized'"),
    ],
)
def test_an_invalid_value_raises_with_the_variable_and_the_allowed_values(
    monkeypatch, name, text, allowed
):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError) as raised:
        env.get(name)
    for part in (name, repr(text), allowed):
        assert part in str(raised.value)


def test_a_name_outside_the_table_is_rejected():
    with pytest.raises(ValueError, match="NVTE_NO_SUCH_THING"):
        env.get("NVTE_NO_SUCH_THING")
