"""Expert parallelism on real processes: the page's example prints its output, and values equal one device."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.expert_cases import Case, one_device_results, rank_results
from tests.distributed.ranks import run_on_ranks
from tests.support.pages import DOCS, examples

CASES = (Case((7, 4), alignment=4), Case((7, 4), capacity=32))


def run_example(device: torch.device) -> dict[str, Any]:
    """Run the example in an existing process group; return its output and each case's tensors."""
    kept = dist.init_process_group, dist.destroy_process_group
    module: Any = dist
    printed = io.StringIO()
    module.init_process_group = module.destroy_process_group = lambda *_: None
    try:
        example = next(text for text in examples("experts.md") if "ep_bootstrap" in text)
        with contextlib.redirect_stdout(printed):
            exec(compile(example, "experts.md", "exec"), {})
    finally:
        module.init_process_group, module.destroy_process_group = kept
    return {
        "printed": printed.getvalue(),
        "cases": [rank_results(case, dist.get_rank(), device=device) for case in CASES],
    }


def test_two_processes_print_the_page_and_equal_one_device(tmp_path):
    actual = run_on_ranks(run_example, 2, tmp_path)
    page = (DOCS / "experts.md").read_text()
    assert (
        actual[0]["printed"]
        == page.split("With two processes it prints\n\n```\n")[1].split("```")[0]
    )
    assert actual[1]["printed"] == ""
    for number, case in enumerate(CASES):
        expected = one_device_results(case)
        for rank, of_rank in enumerate(actual):
            of_case = of_rank["cases"][number]
            for name in ("y", "tokens", "weights"):
                torch.testing.assert_close(
                    of_case[name].double(), expected[name][rank], rtol=1e-5, atol=1e-5
                )
            for name in ("fc1", "fc2"):
                local = expected[name][rank * 4 : rank * 4 + 4]
                torch.testing.assert_close(of_case[name].double(), local, rtol=1e-5, atol=1e-5)
