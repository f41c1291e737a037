"""The examples of the pages on context parallelism and te.verify print the documented output on two processes."""

from __future__ import annotations

import pytest

from tests.clients.processes import run_on_ranks
from tests.support.pages import DOCS, examples


@pytest.mark.parametrize(
    ("page", "before"),
    [
        ("context_parallel.md", "With two processes it prints\n\n```\n"),
        ("verify.md", "It prints\n\n```\n"),
    ],
)
def test_the_example_of_a_page_prints_the_output_on_the_page(page, before, tmp_path):
    program = tmp_path / "example.py"
    example = examples(page)[0]
    program.write_text(example)
    printed = (DOCS / page).read_text().split(before)[1].split("```")[0]
    assert run_on_ranks([str(program)], 2, CUDA_VISIBLE_DEVICES="") == printed
