"""`te bench`: the cases, the measurement, the report, and the comparison of two files."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.support.command import te as run_te
from transformer_engine_tools.bench import measurement
from transformer_engine_tools.bench.cases import FAMILIES, QUANTIZATIONS, RECIPES, Case, cases
from transformer_engine_tools.bench.compare import geometric_mean, pairs, read
from transformer_engine_tools.bench.measure import Effort, measure, measure_in_turns, peak_mib
from transformer_engine_tools.bench.plot import plot_families
from transformer_engine_tools.bench.providers import ENGINE, PROVIDERS, Provider
from transformer_engine_tools.bench.report import print_rows
from transformer_engine_tools.bench.roofs import Roofs
from transformer_engine_tools.bench.run import Row, run
from transformer_engine_tools.bench.workload import Workload

BRIEF = Effort(warmup=1, budget_ms=1.0, fewest=1, most=2)
ROOFS = Roofs(copy=1e12, bf16=1e14, fp8=2e14)
CPU = torch.device("cpu")
# A case of "kernel" is a single launch, which needs a GPU and does not exist in plain torch.
OF_A_CPU = [family for family in FAMILIES if family != "kernel"]
HOST_TIME = ("layer_small", "layer_graphed")  # families whose wall time is the figure


def te(*arguments: str):
    return run_te("bench", *arguments)


def engine_rows(recipes: tuple[str, ...], family: str, device: torch.device) -> list[Row]:
    return list(run(cases(recipes, True, [family]), [ENGINE], device, ROOFS, BRIEF))


@pytest.mark.parametrize("quick", [True, False])
def test_every_case_has_a_unique_name_and_either_operations_or_bytes(quick: bool):
    result = cases(RECIPES, quick)
    assert len({case.name for case in result}) == len(result)
    assert {case.family for case in result} == set(FAMILIES)
    for case in result:
        assert not (case.operations and case.moved)
        assert case.operations or case.moved or case.family in HOST_TIME
        assert case.recipe in (*RECIPES, *QUANTIZATIONS)


def test_a_case_counts_the_work_of_its_products():
    (case,) = [
        c for c in cases(["bf16"], False, ["linear"]) if c.name == "linear_fb/bf16/8192x4096x28672"
    ]
    assert case.operations == 3 * 2 * 8192 * 4096 * 28672
    (case,) = [c for c in cases(["block"], False, ["quantize"]) if "block2d_both" in c.name]
    assert case.moved == 8192 * 14336 * (2 + 1 + 1)


# Their layers are also those of layer_small, layernorm_linear and ops.
WITH_A_SMALLER_ONE = ("layer", "linear", "layernorm_mlp")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(one, marks=pytest.mark.slow if one in WITH_A_SMALLER_ONE else ())
        for one in OF_A_CPU
    ],
)
@pytest.mark.sampled(8)
def test_the_engine_runs_every_family(family: str, device: torch.device):
    recipes = dict.fromkeys(("norm", "rope", "permute", "router"), ("bf16",))
    recipes["attention"] = ("bf16", "current", "delayed")
    rows = engine_rows(recipes.get(family, ("bf16", "current")), family, device)
    assert rows
    for row in rows:
        assert row.error is None, row
        assert row.eager_ms is not None and row.eager_ms > 0
        assert (row.roof is None) == (family in HOST_TIME)
        assert (row.gpu_ms is None) == (device.type == "cpu")
        assert (row.peak_mib is None) == (device.type == "cpu")


@pytest.mark.parametrize("family", OF_A_CPU)
def test_plain_torch_does_the_same_work(family: str, device: torch.device):
    plain = next(provider for provider in PROVIDERS if provider.name == "torch")
    recipes = ("delayed",) if family == "quantize" else ("bf16",)
    for case in cases(recipes, True, [family]):
        reference, ours = plain.workload(case, device), ENGINE.workload(case, device)
        assert reference is not None and ours is not None
        assert [x.shape for x in reference.inputs] == [x.shape for x in ours.inputs]
        if family != "quantize":
            with torch.no_grad():
                expected = reference.function(*reference.inputs, **reference.keywords).shape
                assert ours.function(*ours.inputs, **ours.keywords).shape == expected


def test_a_training_step_replaces_the_gradients():
    module = torch.nn.Linear(4, 4)
    step = Workload(module, (torch.randn(2, 4),)).step(backward=True)
    torch.manual_seed(0)
    step()
    assert module.weight.grad is not None
    first = module.weight.grad.clone()
    step()
    assert torch.equal(module.weight.grad, first)


def test_a_forward_step_keeps_no_graph():
    records: list[bool] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        records.append(torch.is_grad_enabled())
        return x

    Workload(function, (torch.randn(2, requires_grad=True),)).step(backward=False)()
    assert records == [False]


def test_a_failure_is_a_row_with_its_sentence():
    def build(case: Case, device: torch.device) -> Workload:
        raise RuntimeError("out of luck\nmore")

    broken = Provider("broken", ("bf16",), {"rope": build})
    (row,) = run(cases(["bf16"], True, ["rope"]), [broken], CPU, ROOFS, BRIEF)
    assert (row.error, row.eager_ms) == ("RuntimeError: out of luck", None)


def test_a_missing_library_is_a_sentence():
    missing = Provider("other", ("bf16",), {}, module="no_such_library", remedy="pip install it")
    assert missing.unavailable_reason(CPU) == "not installed; pip install it"
    assert list(run(cases(["bf16"], True, ["rope"]), [missing], CPU, ROOFS, BRIEF)) == []
    assert (
        replace(missing, module=None, gpu_only="needs one").unavailable_reason(CPU) == "needs one"
    )


def test_a_case_runs_on_the_providers_of_its_recipe():
    result = cases(["bf16", "delayed", "current"], True, ["quantize", "linear"])
    plain = next(provider for provider in PROVIDERS if provider.name == "torch")
    selection = [case.name for case in result if plain.workload(case, CPU) is not None]
    assert [name for name in selection if name.startswith("linear")] == [
        case.name for case in result if case.family == "linear" and case.recipe == "bf16"
    ]
    assert [name.split("/")[1] for name in selection if name.startswith("quantize")] == [
        "delayed_row",
        "delayed_both",
    ]


def test_the_roof_is_that_of_the_kind_of_work():
    linear = next(c for c in cases(["bf16", "current"], True, ["linear"]) if c.recipe == "current")
    assert ROOFS.share(linear, 1.0) == pytest.approx(linear.operations * 1e3 / 2e14)
    assert replace(ROOFS, fp8=None).share(linear, 1.0) == pytest.approx(
        linear.operations * 1e3 / 1e14
    )
    rope = cases(["bf16"], True, ["rope"])[0]
    assert ROOFS.share(rope, 1.0) == pytest.approx(rope.moved * 1e3 / 1e12)


def test_a_measurement_repeats_within_its_effort(device: torch.device):
    calls: list[int] = []
    x = torch.ones(8, device=device)
    timing = measure(lambda: calls.append(len(x + 1)), device, Effort(2, 1e3, 3, 5))
    queued = 1 + 5 if device.type == "cuda" else 0
    assert len(calls) == 2 + queued + 5
    assert timing.eager_ms > 0


@pytest.mark.gpu
def test_the_peak_equals_the_bytes_that_a_call_allocates():
    size = 1 << 26
    assert (
        peak_mib(lambda: torch.empty(size, dtype=torch.uint8, device="cuda"), torch.device("cuda"))
        == 64
    )


@pytest.mark.gpu
def test_gpu_time_is_that_of_the_gpu_and_host_time_that_of_the_host():
    # about 20 ms
    timing = measure(lambda: torch.cuda._sleep(40_000_000), torch.device("cuda"), BRIEF)
    assert timing.gpu_ms is not None and timing.cpu_ms is not None
    assert timing.gpu_ms > 10 * timing.cpu_ms


def test_the_command_writes_figures_machine_and_pictures(tmp_path: Path):
    path, folder = tmp_path / "figures.json", tmp_path / "plots"
    arguments = [
        "--quick",
        "--family",
        "rope",
        "--family",
        "quantize",
        "--recipe",
        "bf16",
        "--recipe",
        "delayed",
    ]
    result = te(*arguments, "--provider", "te", "--json", str(path), "--plot-dir", str(folder))
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert {"machine", "torch", "command", "meaning", "roofs", "missing", "results"} <= set(report)
    assert {row["family"] for row in report["results"]} == {"rope", "quantize"}
    assert all(row["provider"] == "te" and row["eager_ms"] > 0 for row in report["results"])
    assert {picture.name for picture in folder.iterdir()} == {"rope.png", "quantize.png"}
    for expected in ("of roof", "quantize", "wall ms", "roofs"):
        assert expected in result.output


def test_an_interrupt_prints_the_rows_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(*arguments):
        yield Row("rope_fb/bf16/s1", "rope", "bf16", "te", eager_ms=1.5)
        raise KeyboardInterrupt

    monkeypatch.setattr(measurement, "run", interrupt)
    path = tmp_path / "figures.json"
    result = te("--quick", "--family", "rope", "--json", str(path))
    assert result.exit_code == 0, result.output
    assert "stopped; figures until then" in result.output
    assert "1.500" in result.output
    assert len(json.loads(path.read_text())["results"]) == 1


def test_rows_are_compared_with_plain_torch_on_the_same_sizes():
    row = Row("linear_fb/current/1x1x1", "linear", "current", "te", eager_ms=2.0)
    plain = replace(row, case="linear_fb/bf16/1x1x1", recipe="bf16", provider="torch", eager_ms=5.0)
    console = Console(width=200, record=True, file=io.StringIO())
    print_rows(console, [row, plain])
    text = console.export_text()
    assert "2.50" in text
    assert "wall ms" in text


def test_a_table_has_the_columns_that_a_row_fills():
    row = Row("rope_f/bf16/1", "rope", "bf16", "te", eager_ms=2.0)
    failed = replace(row, provider="torch", eager_ms=None, error="RuntimeError: out of luck")
    console = Console(width=200, record=True, file=io.StringIO())
    print_rows(console, [row])
    text = console.export_text()
    assert "wall ms" in text
    assert "GPU ms" not in text and "peak MiB" not in text and "error" not in text
    print_rows(console, [row, failed])
    assert "RuntimeError: out of luck" in console.export_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of a machine without a GPU")
def test_the_command_reports_figures_of_a_cpu():
    result = te("--family", "rope", "--recipe", "bf16")
    assert "the figures are a CPU's" in result.output
    assert "without torch.compile: compiling for a CPU" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--family", "novel"], "family 'novel' does not exist; choose from quantize, norm"),
        (["--recipe", "fp7"], "recipe 'fp7' does not exist; choose from bf16, delayed"),
        (["--only", "absent"], "no benchmark matches"),
        (
            ["--family", "norm", "--recipe", "delayed"],
            "--recipe delayed has no benchmark in --family norm; choose from bf16",
        ),
        (
            ["--family", "quantize", "--recipe", "none"],
            "--recipe bf16 has no benchmark in --family quantize; choose from delayed, current",
        ),
        (["--provider", "other"], "provider 'other' does not exist; choose from te, torch"),
        (
            ["--json", "/absent/a.json"],
            "--json /absent/a.json: the folder /absent does not exist; create it first",
        ),
        (
            ["--compare", "/absent/a.json", "/absent/b.json"],
            "/absent/a.json is not a readable JSON file",
        ),
    ],
)
def test_a_wrong_option_is_one_sentence_and_exit_code_2(arguments: list[str], message: str):
    result = te(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_high_precision_has_the_name_of_the_other_commands_too():
    result = te(
        "--family", "norm", "--only", "norm_f/RMSNorm", "--recipe", "none", "--provider", "te"
    )
    assert result.exit_code == 0
    assert "RMSNorm/256x512" in result.output


def figures(**cases: float) -> list[dict[str, Any]]:
    return [{"case": name.replace("_of_", "/"), "gpu_ms": value} for name, value in cases.items()]


def test_a_comparison_reads_lists_and_reports(tmp_path: Path):
    first, second = tmp_path / "list.json", tmp_path / "report.json"
    first.write_text(
        json.dumps([{"case": "import", "seconds": 5.7}, *figures(norm_of_a=2.0, norm_of_b=8.0)])
    )
    other = {"case": "norm/a", "provider": "torch", "gpu_ms": 100.0}
    second.write_text(
        json.dumps({"results": [*figures(norm_of_a=1.0, norm_of_b=8.0, rope_of_c=1.0), other]})
    )
    shared = pairs(read(first), read(second))
    assert [(pair.case, pair.family, pair.ratio("gpu_ms")) for pair in shared] == [
        ("norm/a", "norm", 0.5),
        ("norm/b", "norm", 1.0),
    ]
    assert shared[0].ratio("cpu_ms") is None
    result = te("--compare", str(first), str(second))
    assert result.exit_code == 0, result.output
    assert "0.707" in result.output  # the geometric mean of 0.5 and 1


def test_a_comparison_without_a_common_case_is_rejected(tmp_path: Path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    first.write_text(json.dumps(figures(norm_of_a=1.0)))
    second.write_text(json.dumps(figures(norm_of_b=1.0)))
    result = te("--compare", str(first), str(second))
    assert result.exit_code == 2
    assert "have no case in common" in result.output


def test_a_file_without_cases_is_rejected(tmp_path: Path):
    path = tmp_path / "other.json"
    path.write_text('{"losses": [1, 2]}')
    with pytest.raises(
        ValueError, match=r"other.json does not hold a list of cases; give a file that te bench"
    ):
        read(path)


def test_the_geometric_mean_skips_missing_values():
    assert geometric_mean([2.0, None, 0.5]) == pytest.approx(1.0)
    assert geometric_mean([None]) is None


def test_a_family_is_one_picture_of_readable_size(tmp_path: Path):
    row = Row(
        "linear_fb/bf16/1x1x1", "linear", "bf16", "te", 1.0, 0.5, 1.1, 100.0, "TFLOP/s", 0.5, 10.0
    )
    rows = [
        row,
        replace(row, provider="torch", gpu_ms=50.0),
        replace(row, provider="new", error="no", gpu_ms=None, eager_ms=None),
    ]
    (path,) = plot_families(tmp_path, rows, "a GPU")
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(header[16:20], "big") >= 1000


def test_attention_has_packed_wide_and_fp8_cases():
    results = {case.name: case for case in cases(RECIPES, False, ["attention"])}
    for name in (
        "dpa_f/bf16/thd_b8_s2048_h32_8_d128",
        "dpa_fb/bf16/causal_b2_s4096_h16_16_d256",
        "dpa_f/current/causal_b2_s8192_h32_8_d128",
        "dpa_fb/delayed/causal_b2_s8192_h32_8_d128",
        "dpa_fb/delayed/causal_b2_s8192_h32_8_d128_fp8backward",
    ):
        assert name in results
    assert {case.recipe for case in results.values()} == {"bf16", "delayed", "current"}


def test_the_backward_of_an_fp8_attention_has_the_precision_of_its_case(
    device: torch.device, monkeypatch
):
    """In FP8 the backward pass quantizes dO, so its slot of the scaling state has a nonzero amax."""
    monkeypatch.setenv("TE_EMULATE", "1")
    monkeypatch.setenv("NVTE_FP8_DPA_BWD", "0")
    for case in cases(["delayed"], True, ["attention"]):
        workload = ENGINE.workload(case, device)
        assert workload is not None
        workload.step(case.backward)()
        histories = workload.function.fp8_meta.get("scaling_bwd")  # pyright: ignore[reportFunctionMemberAccess]
        counted = histories is not None and bool(histories.amax_history.count_nonzero())
        assert counted == case.arguments["fp8_backward"]
    assert os.environ["NVTE_FP8_DPA_BWD"] == "0"


@pytest.mark.gpu
def test_calls_in_turns_are_each_timed_by_itself():
    small, large = (torch.randn(side, side, device="cuda") for side in (64, 4096))
    quick, slow = measure_in_turns([lambda: small @ small, lambda: large @ large], 5)
    assert 0.0 < quick < slow


def test_names_in_the_help_are_the_names_of_the_tables():
    from transformer_engine_tools.bench import cases, distributed_cases, options, providers

    assert options.RECIPES == cases.RECIPES
    assert tuple(cases.FAMILIES) == options.FAMILIES
    assert tuple(distributed_cases.RANKS_FAMILIES) == options.RANKS_FAMILIES
    assert tuple(provider.name for provider in providers.PROVIDERS) == options.PROVIDERS
