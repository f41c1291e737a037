import pytest

from transformer_engine.common import env


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


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("0", False), ("true", True), ("Off", False), ("", False), (" yes ", True)],
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


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("NVTE_FUSED_ATTN", "maybe", "0 or 1"),
        ("NVTE_DEBUG_LEVEL", "loud", "an integer"),
        ("NVTE_BACKWARD_OVERRIDE", "low", "'high_precision', 'dequantized'"),
    ],
)
def test_an_unparsable_value_names_the_variable_the_value_and_what_is_allowed(
    monkeypatch, name, text, allowed
):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError) as raised:
        env.get(name)
    for part in (name, repr(text), allowed):
        assert part in str(raised.value)


def test_a_name_outside_the_table_is_refused():
    with pytest.raises(ValueError, match="NVTE_NO_SUCH_THING"):
        env.get("NVTE_NO_SUCH_THING")
