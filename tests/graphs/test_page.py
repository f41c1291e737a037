"""Examples on the graphs page run, on a CPU without capturing."""

from __future__ import annotations

import warnings

from tests.support.pages import examples, run


def test_the_graphs_pages_examples_run(capsys):
    assert len(examples("graphs.md")) == 3
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "CUDA graphs need a GPU")
        names = run("graphs.md")
    assert names["y"].shape == (32, 2, 256)
    assert "graphed: " in capsys.readouterr().out
