"""The page of memory: its examples run, on a CPU without moving anything."""

from __future__ import annotations

from tests.support.pages import examples, run
from transformer_engine.pytorch.quantization import emulate


def test_the_examples_run(capsys):
    assert len(examples("memory.md")) == 5
    with emulate():
        names = run("memory.md")
    assert names["plan"].weight_copies == 0
    assert names["smaller"].fits and names["smaller"].peak <= 0.8 * names["default"].peak
    assert names["x"].grad.any()
    assert "at the peak" in capsys.readouterr().out
