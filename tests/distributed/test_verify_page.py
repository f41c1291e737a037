"""The page on te.verify: its example runs on two processes as printed."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.pages import DOCS, examples
from tests.support.programs import search_path


def test_the_example_runs_on_two_processes_as_printed(tmp_path):
    program = tmp_path / "check.py"
    (example,) = examples("verify.md")
    group = f'"gloo", init_method="file://{tmp_path}/rendezvous", rank=int(__import__("os").environ["RANK"])'
    program.write_text(example.replace('"gloo")', f"{group}, world_size=2)"))
    common = {**os.environ, "PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env={**common, "WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, errors
    printed = (DOCS / "verify.md").read_text().split("It prints\n\n```\n")[1].split("```")[0]
    assert outputs[0][0] == printed
