"""The page of context parallelism: its example runs on two processes as printed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from tests.support.pages import DOCS, examples
from tests.support.programs import search_path


def test_the_example_runs_on_two_processes_as_printed(tmp_path):
    program = tmp_path / "long_sequence.py"
    (example,) = examples("context_parallel.md")
    program.write_text(example)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, errors
    printed = (
        (DOCS / "context_parallel.md")
        .read_text()
        .split("With two processes it prints\n\n```\n")[1]
        .split("```")[0]
    )
    assert outputs[0][0] == printed
