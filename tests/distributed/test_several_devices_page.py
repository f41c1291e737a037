"""Programs of the page "Several devices" print the output shown there, on two processes; slow tests use torchrun."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.clients.processes import run_on_ranks
from tests.support.pages import DOCS, examples
from tests.support.programs import search_path

PAGE = "several_devices.md"
PROGRAMS = ("data_parallel", "sharded", "tensor_parallel", "all_together")


def page_output(name):
    """The output that the page shows after a program."""
    section = (DOCS / PAGE).read_text().split("```python\n")[1 + PROGRAMS.index(name)]
    return section.split("it prints\n\n```\n")[1].split("```")[0]


def run(name, folder, *arguments):
    """Run two processes on the CPU and return their output."""
    programs = examples(PAGE)
    assert len(programs) == len(PROGRAMS)
    program = folder / f"{name}.py"
    program.write_text(programs[PROGRAMS.index(name)])
    environment = {
        **os.environ,
        "PYTHONPATH": search_path(),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    done = subprocess.run(
        [*launch, str(program), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=folder,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_data_parallel_example_prints_the_page_output(tmp_path):
    program = tmp_path / "data_parallel.py"
    program.write_text(examples(PAGE)[PROGRAMS.index("data_parallel")])
    assert run_on_ranks([str(program)], 2, CUDA_VISIBLE_DEVICES="") == page_output("data_parallel")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data_parallel", "sharded", "tensor_parallel"])
def test_torchrun_programs_print_the_page_output(name, tmp_path):
    assert run(name, tmp_path) == page_output(name)


@pytest.mark.slow
def test_combined_example_runs_with_tensor_parallel_ranks(tmp_path):
    assert run("all_together", tmp_path, "2", "1") == page_output("all_together")


@pytest.mark.slow
@pytest.mark.parametrize("cp", [1, 2])
def test_combined_example_runs_with_data_or_context_parallel_ranks(cp, tmp_path):
    expected = f"dp {2 // cp}, cp {cp}, tp 1: {64 // cp} of 64 tokens, the loss falls: True\n"
    assert run("all_together", tmp_path, "1", str(cp)) == expected
