"""An environment variable of the original without effect here raises one warning if its value is not the default."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from transformer_engine.common import env, warning
from transformer_engine.common.recipe import DelayedScaling

ACCEPTED = [row for row in env.VARIABLES.values() if row.meaning.startswith("Accepted; ")]


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for row in ACCEPTED:
        monkeypatch.delenv(row.name, raising=False)
    monkeypatch.setattr(warning, "_warned", set())


def messages(make=DelayedScaling):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    return [str(w.message) for w in caught if "has no effect" in str(w.message)]


REASONS = {
    "NVTE_PRINT_RANK": ("1", "nothing is logged per rank"),
    "NVTE_USE_FAST_MATH": ("2", "arithmetic is IEEE everywhere"),
    "NVTE_MASKED_SOFTMAX_FUSION": (
        "0",
        "scale, mask of bool or uint8 and softmax are one operation",
    ),
    "NVTE_EXT_MARGIN_SM": ("8", "matrix products leave no SMs free"),
    "NVTE_JAX_CUSTOM_CALLS_RE": ("Norm.*", "name the primitives in NVTE_JAX_CUSTOM_CALLS"),
    "NVTE_UBDEBUG": ("verbose", "communication overlap has no debug mode"),
}


@pytest.mark.parametrize("name", REASONS)
def test_a_variable_without_effect_is_warned_about_once(monkeypatch, name):
    value, reason = REASONS[name]
    assert messages() == []
    monkeypatch.setenv(name, value)
    (message,) = messages()
    assert message.startswith(f"{name}={value!r} has no effect: {reason}")
    assert messages() == []


def test_each_variable_is_warned_about():
    for row in ACCEPTED:
        os.environ[row.name] = {bool: str(int(not row.default)), int: "77", str: "x"}[row.kind]
    try:
        results = {message.partition("=")[0] for message in messages()}
    finally:
        for row in ACCEPTED:
            del os.environ[row.name]
    assert results == {row.name for row in ACCEPTED} - warning._MET
    assert len(results) >= 25


def test_variables_whose_purpose_is_met_are_in_the_table():
    assert {row.name for row in ACCEPTED} >= warning._MET


@pytest.mark.parametrize(
    "row", [row for row in ACCEPTED if row.default is not None], ids=lambda row: row.name
)
def test_a_default_value_is_not_warned_about(monkeypatch, row):
    monkeypatch.setenv(row.name, str(int(row.default)))
    assert messages() == []


@pytest.mark.parametrize(("value", "expected"), [("1", 1), (None, 0)])
def test_importing_warns_only_where_a_variable_is_set(value, expected):
    environment = {k: v for k, v in os.environ.items() if k not in env.VARIABLES}
    environment |= {"PYTHONPATH": str(Path(env.__file__).parents[2])}
    environment |= {} if value is None else {"NVTE_PRINT_RANK": value}
    program = "from transformer_engine.common.recipe import DelayedScaling; DelayedScaling(); DelayedScaling()"
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("NVTE_PRINT_RANK='1' has no effect") == expected
