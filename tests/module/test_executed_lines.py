"""A warm call executes few files and lines, so that a reader can follow it from module to product."""

from __future__ import annotations

import json

from tests.support.fast_path import needs_fast_path
from tests.support.programs import output_without_gpu

# Upper bounds for `benchmarks/executed_lines.py`: (files, logical lines) in one warm forward and backward
# pass in FP8. Lower a bound when a pass enters fewer. Lines have a margin of 3 %. `docs/architecture.md` has
# the goals.
MOST = {"Linear": (28, 536), "LayerNormMLP": (36, 820), "TransformerLayer": (56, 1510)}
FIRST_CALL = 2160  # Python function calls in a TransformerLayer's first call


@needs_fast_path
def test_a_warm_pass_enters_few_files_and_lines():
    figures = json.loads(output_without_gpu("benchmarks/executed_lines.py"))
    assert figures.pop("calls of TransformerLayer's first call") <= FIRST_CALL
    entered = {name: (counts["files"], counts["lines"]) for name, counts in figures.items()}
    assert {
        name: entered[name]
        for name, (files, lines) in MOST.items()
        if entered[name][0] > files or entered[name][1] > lines
    } == {}
