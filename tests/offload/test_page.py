"""The page of memory: its examples run, on a CPU without moving anything."""

from __future__ import annotations

from tests.support.pages import examples, run
from transformer_engine.pytorch.quantization import emulate


def test_the_examples_run(capsys):
    assert len(examples("memory.md")) == 4
    with emulate():
        names = run("memory.md")
    assert names["plan"].weight_copies == 0
    assert names["x"].grad.any()
    assert "at the peak" in capsys.readouterr().out
