"""`te bench --distributed`: cases, the exposed communication of a trace, and a run on two processes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from tests.support import forked
from tests.support.command import te as run_te
from tests.support.programs import search_path
from transformer_engine_tools.bench.cases import RECIPES
from transformer_engine_tools.bench.compare import pairs, read
from transformer_engine_tools.bench.distributed import RanksRow, exposure
from transformer_engine_tools.bench.distributed_cases import RANKS_FAMILIES, ranks_cases
from transformer_engine_tools.bench.distributed_report import print_rows


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_case_has_a_unique_name_with_the_number_of_ranks(quick: bool, ranks: int):
    result = ranks_cases(RECIPES, quick, ranks)
    assert len({case.name for case in result}) == len(result)
    assert {case.family for case in result} == set(RANKS_FAMILIES)
    for case in result:
        assert case.name.endswith(f"_ranks{ranks}")
        assert case.work in (1, ranks)
        assert (case.moved > 0) == (case.family == "collective")


def test_long_sequences_and_a_llama_layer_are_measured():
    names = [case.name for case in ranks_cases(["bf16", "current"], False, 2)]
    for sequence in (65536, 131072):
        for scheme in ("p2p", "a2a", "all_gather"):
            assert f"attention_cp_fb/bf16/causal_s{sequence}_h32_8_d128_{scheme}_ranks2" in names
    assert "layer_sp_fb/bf16/llama8b_s8192_ranks2" in names
    assert "layer_sp_fb/current/llama8b_s8192_ranks2" in names


def test_four_ranks_also_share_a_sequence_over_two_levels():
    cases = ranks_cases(["bf16"], False, 4, ["attention_cp"])
    assert [case.arguments["scheme"] for case in cases] == 2 * [
        "p2p",
        "a2a",
        "all_gather",
        "a2a+p2p",
    ]
    assert (
        len({case.one_device for case in cases})
        == len({case.arguments["sequence"] for case in cases})
        == 2
    )


def test_an_all_reduce_sends_twice_as_much_as_an_all_gather():
    moved = {
        case.arguments["operation"]: case.moved
        for case in ranks_cases(["bf16"], True, 4, ["collective"])
    }
    assert moved["all_reduce"] == 2 * moved["all_gather"]
    assert moved["all_gather"] == 0.75 * moved["send_receive"]


def test_exposure_counts_the_time_in_which_only_communication_runs():
    compute = [("matmul", 0.0, 4.0), ("attention", 3.0, 6.0)]
    assert exposure([*compute, ("ncclDevKernel_SendRecv", 1.0, 5.0)]) == 0.0
    assert exposure([*compute, ("ncclDevKernel_AllGather", 5.0, 8.0)]) == 2.0 / 8.0
    # Two collectives at once count once, and an idle GPU does not count.
    collectives = [("ncclDevKernel_AllGather", 7.0, 9.0), ("ncclDevKernel_AllReduce", 7.0, 10.0)]
    assert exposure([*compute, *collectives]) == 3.0 / 10.0
    assert exposure([*compute, ("Memcpy PtoP (Device -> Device)", 5.0, 8.0)]) == 2.0 / 8.0
    assert exposure(compute) == 0.0
    assert exposure([]) is None


def test_columns_without_figures_are_left_out(capsys: pytest.CaptureFixture[str]):
    rows = [
        RanksRow(
            "layer_sp_fb/bf16/a_ranks2",
            "layer_sp",
            "bf16",
            2,
            one_ms=4.0,
            eager_ms=2.0,
            speedup=2.0,
        ),
        RanksRow(
            "layer_sp_fb/bf16/b_ranks2", "layer_sp", "bf16", 2, error="ValueError: [too] small"
        ),
    ]
    print_rows(Console(width=120), rows)
    printed = capsys.readouterr().out
    assert "speedup" in printed and "GB/s" not in printed
    assert "2.00" in printed and "ValueError: [too] small" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--distributed", "--devices", "1"], "--devices 1 is below 2"),
        (["--devices", "2"], "--devices has no effect without --distributed"),
        (["--distributed", "--provider", "te"], "--provider has no effect with --distributed"),
        (["--distributed", "--family", "layer"], "family 'layer' of --distributed does not exist"),
        (["--distributed", "--only", "nothing"], "no benchmark matches"),
    ],
)
def test_options_that_cannot_work_are_rejected_before_processes_start(
    options: list[str], message: str
):
    result = run_te("bench", *options)
    assert result.exit_code == 2
    assert message in result.output


# A forked rank does not import torch again, as a spawned one does for five seconds.
FORKED_RANKS = """
from functools import partial
import torch.distributed.launcher.api as api
api.LaunchConfig = partial(api.LaunchConfig, start_method="fork")
from transformer_engine_tools import main
main()
"""


def bench_on_two(folder: Path, command: list[str], *options: str) -> Path:
    """Run `te bench --distributed` on two processes of the CPU and return its file.

    Args:
        folder: Folder of the file.
        command: Arguments of Python that precede those of `te`.
        *options: Further options of `te bench`.
    """
    path = folder / "figures.json"
    environment = {
        **os.environ,
        "PYTHONPATH": search_path(),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    inputs = [*command, "bench", "--distributed", "--json", str(path), *options]
    assert "2 ranks on a CPU, gloo" in forked.output(inputs, folder, environment, patience=500)
    return path


def check_figures(path: Path, families: set[str]) -> None:
    content = json.loads(path.read_text())
    assert (content["ranks"], content["backend"]) == (2, "gloo")
    assert {row["family"] for row in content["results"]} == families
    for row in content["results"]:
        assert "error" not in row, row
        if row["family"] == "collective":
            assert row["rate"] > 0
            continue
        assert row["host_ms"] > 0
        work = 2 if row["family"] == "layers_fsdp" else 1
        assert row["speedup"] == pytest.approx(work * row["one_ms"] / row["eager_ms"], rel=1e-3)
        expected = max(0.0, 1 - row["compute_ms"] / row["eager_ms"])
        assert row["exposed"] == pytest.approx(expected, abs=1e-3)
    assert len(pairs(read(path), read(path))) == len(content["results"])


def test_two_processes_measure_a_collective_and_a_layer(tmp_path: Path):
    options = ("--recipe", "bf16", "--only", "all_gather_0.25MiB,layer_sp_fb,layer_ub_fb")
    path = bench_on_two(tmp_path, ["-c", FORKED_RANKS], *options)
    check_figures(path, {"collective", "layer_sp", "layer_ub"})


@pytest.mark.slow
def test_two_processes_measure_every_family(tmp_path: Path):
    path = bench_on_two(
        tmp_path, ["-m", "transformer_engine"], "--recipe", "current", "--recipe", "bf16"
    )
    check_figures(path, set(RANKS_FAMILIES))
