"""`te bench --provider jax --provider xla`: the same work, as compiled programs that pass on their state."""

from __future__ import annotations

import functools
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="te bench measures the roofs by torch")

import jax
import jax_goals
import jax_ranks
import numpy as np
import torch
from rich.console import Console

from transformer_engine.jax.primitives import launching
from transformer_engine_tools.bench import jax_workload
from transformer_engine_tools.bench.cases import RECIPES, Case, cases
from transformer_engine_tools.bench.compare import pairs, print_comparison, read
from transformer_engine_tools.bench.measure import Effort
from transformer_engine_tools.bench.measurement import _providers
from transformer_engine_tools.bench.providers import ENGINE
from transformer_engine_tools.bench.providers.in_jax import JAX, XLA
from transformer_engine_tools.bench.report import as_dict
from transformer_engine_tools.bench.roofs import Roofs
from transformer_engine_tools.bench.run import run

BRIEF = Effort(warmup=1, budget_ms=1.0, fewest=1, most=2)
ROOFS = Roofs(copy=1e12, bf16=1e14, fp8=2e14)
CPU = torch.device("cpu")
FIGURES = Path(jax_goals.__file__).parent / "results" / "jax_h200.json"


def small(family: str, recipe: str) -> Case:
    return cases([recipe], True, [family])[-1]


def result_shapes(provider, case: Case):
    workload = provider.workload(case, CPU)
    with workload.context():
        y = jax.eval_shape(workload.function, workload.params, workload.state, *workload.inputs)
    return [x.shape for x in workload.inputs], jax.tree.leaves(
        jax.tree.map(lambda leaf: leaf.shape, y)
    )


@pytest.mark.parametrize(
    "family",
    [family for family in JAX.builders if family not in ("quantize", "layer_small", "kernel")],
)
def test_plain_jax_does_equal_work_and_torch_does_work_with_equal_size(
    family: str, monkeypatch: pytest.MonkeyPatch
):
    case = small(family, "bf16")
    # Only parameter shapes are needed, so no program initializes the values.
    monkeypatch.setattr(jax, "jit", lambda function: functools.partial(jax.eval_shape, function))
    ours, plain = (result_shapes(provider, case) for provider in (JAX, XLA))
    assert ours == plain
    torchs = ENGINE.workload(case, CPU)
    assert [np.prod(shape) for shape in ours[0]] == [x.numel() for x in torchs.inputs]


def test_a_row_has_the_figures_of_a_program(cpu_alone):
    case = small("dense", "current")
    (row,) = run([case], [JAX, XLA], CPU, ROOFS, BRIEF)
    assert (row.error, row.provider, row.recipe) == (None, "jax", "current")
    assert row.eager_ms > 0 and row.compile_s > 0 and row.peak_mib > 0
    assert (row.gpu_ms, row.cpu_ms, row.fp8_calls) == (None, None, 0)
    assert row.rate == pytest.approx(case.operations / row.eager_ms / 1e9)


@pytest.mark.parametrize("kind", ["delayed", "block1d", "block2d", "mxfp8", "nvfp4"])
def test_every_quantization_benchmark_writes_both_directions(kind: str):
    case = next(case for case in cases(RECIPES, True, ["quantize"]) if f"{kind}_both" in case.name)
    workload = JAX.workload(case, CPU)
    result = jax.eval_shape(workload.function, {}, workload.state, *workload.inputs)
    assert {result.rowwise_tensor.data.shape, result.colwise_tensor.data.shape} <= {
        (256, 512),
        (512, 256),
    }


def test_a_call_takes_the_state_of_the_previous_call():
    workload = JAX.workload(small("dense", "delayed"), CPU)
    with workload.context():
        call = jax_workload._CompiledCall(workload, backward=True)
    amax = np.abs(np.asarray(workload.inputs[0], np.float32)).max()
    (y, params, (x,)), state = call(), call.state["fp8_metas"]
    assert state["x_scale"][0] == np.float32(448) / amax
    assert (state["x_amax_history"] != 0).sum() == 1
    call()
    assert (call.state["fp8_metas"]["x_amax_history"] != 0).sum() == 2
    assert y.shape == params["kernel"].shape == x.shape == (128, 128)


@pytest.mark.skipif(
    launching.kernels_unsupported_reason() is not None,
    reason="no kernel can be lowered for CUDA here",
)
def test_both_frameworks_start_a_kernel_of_every_family_from_the_same_record():
    recognized = cases(["bf16"], True, ["kernel"])
    assert len(recognized) >= 12
    for case in recognized:
        assert ENGINE.workload(case, CPU) is None and JAX.workload(case, CPU) is None, (
            "it needs a GPU"
        )
        workload = JAX.workload(case, torch.device("cuda"))
        call = jax.jit(lambda *x, workload=workload: workload.function({}, {}, *x))
        text = call.trace(*workload.inputs).lower(lowering_platforms=("cuda",)).as_text()
        assert "triton_kernel_call_ffi" in text, case.name


def test_a_compiled_program_is_read_from_the_disk_cache():
    before = jax.config.jax_compilation_cache_dir
    workload = JAX.workload(small("dense", "bf16"), CPU)
    with jax_workload._cache_on_disk():
        folder = Path(jax.config.jax_compilation_cache_dir)
        workload._compiled(False)
        written = len(list(folder.iterdir()))
        jax.clear_caches()
        workload._compiled(False)
        assert written > 0 and len(list(folder.iterdir())) == written
    assert jax.config.jax_compilation_cache_dir == before


def trace_planes(*streams):
    def line(name, *spans):
        events = [
            SimpleNamespace(name=kernel, start_ns=start, duration_ns=length)
            for kernel, start, length in spans
        ]
        return SimpleNamespace(name=name, events=events)

    return SimpleNamespace(
        planes=[
            SimpleNamespace(
                name="/device:GPU:0",
                lines=[
                    *(
                        line(f"Stream #{index}(Compute)", *spans)
                        for index, spans in enumerate(streams)
                    ),
                    line("XLA Ops", ("op", 0, 99)),
                ],
            ),
            SimpleNamespace(name="/host:CPU", lines=[line("python", ("call", 0, 1000))]),
        ]
    )


FIRST, SECOND = [("a", 10, 10), ("b", 30, 10), ("a", 210, 8)], [("c", 15, 10), ("d", 110, 1)]


def test_overlapping_streams_count_once_and_calls_begin_after_the_sleep_kernel():
    sleep = "at::cuda::(anonymous namespace)::spin_kernel(long)"
    torch_s = [("fill", 0, 2), (sleep, 3, 6), ("fill", 190, 2), (sleep, 200, 6)]
    assert jax_workload._calls(trace_planes(FIRST, SECOND, torch_s)) == [15 + 10 + 1, 8]


def test_a_call_without_a_recorded_sleep_has_the_mean_time(monkeypatch):
    monkeypatch.setattr(jax_workload, "PROFILED", 2)
    assert jax_workload._calls(trace_planes(FIRST, SECOND)) == [(15 + 10 + 1 + 8) / 2]
    assert jax_workload._calls(trace_planes()) == []


def test_jax_providers_are_measured_only_on_request():
    assert not {"jax", "xla"} & {provider.name for provider in _providers(None)}
    assert [provider.name for provider in _providers(["xla", "jax"])] == ["jax", "xla"]


def test_a_device_that_only_one_framework_has_is_rejected(cpu_alone):
    assert JAX.unavailable_reason(CPU) is None
    assert (
        JAX.unavailable_reason(torch.device("cuda"))
        == 'jax finds no GPU; pip install ".[jax-cuda13]" in a checkout of this package'
    )


def write_result_rows(path: Path, **times: float) -> Path:
    """Write a result file for one case, {provider: wall time}."""
    rows = [
        {"case": "dense_fb/bf16/8", "provider": name, "eager_ms": time}
        for name, time in times.items()
    ]
    path.write_text(json.dumps({**as_dict([], ROOFS, {}), "results": rows}))
    return path


@pytest.mark.parametrize(
    ("first", "second", "ratios"),
    [
        ({"te": 2.0, "xla": 9.0}, {"jax": 3.0, "xla": 8.0}, {"dense_fb/bf16/8": 1.5}),
        ({"jax": 2.0}, {"te": 4.0, "jax": 3.0}, {"dense_fb/bf16/8": 1.5}),
        (
            {"te": 2.0, "jax": 4.0}, {"te": 3.0, "jax": 3.0},
            {"dense_fb/bf16/8, te": 1.5, "dense_fb/bf16/8, jax": 0.75},
        ),
    ],
)  # fmt: skip
def test_files_are_compared_by_the_rows_of_each_engine(first, second, ratios, tmp_path: Path):
    shared = pairs(
        *(
            read(write_result_rows(tmp_path / name, **times))
            for name, times in (("a", first), ("b", second))
        )
    )
    assert {pair.case: pair.ratio("eager_ms") for pair in shared} == ratios


def test_the_figures_of_an_h200_are_compared_and_their_goals_are_those_of_their_rows(
    tmp_path: Path,
):
    assert read(FIGURES).keys() == {"te", "jax"}
    content = json.loads(FIGURES.read_text())
    assert [goal.as_dict() for goal in jax_goals.goals(content)] == content["goals"]
    print_comparison(console := Console(file=io.StringIO(), width=300), FIGURES, FIGURES)
    assert "layer_fb/delayed/llama8b_s8192, jax" in console.file.getvalue()  # pyright: ignore


def test_a_goal_is_a_minimum_or_a_maximum():
    at_least, at_most = (jax_goals.Goal("", sense, 2.0, 3.0) for sense in (">=", "<="))
    assert (at_least.reached, at_least.share) == (True, 1.5)
    assert (at_most.reached, at_most.share) == (False, 2 / 3)
    assert jax_goals.Goal("", "<=", 2.0, None).reached is None


def test_a_goal_whose_row_is_absent_is_not_measured():
    content = json.loads(FIGURES.read_text())
    full = [goal.what for goal in jax_goals.goals(content)]
    results = list(jax_goals.goals({"results": []}))
    assert [goal.what for goal in results] == full
    assert all(goal.reached is None for goal in results)


@pytest.mark.parametrize("key", ["two_gpus", "attention"])
def test_a_row_with_an_error_is_a_goal_that_is_not_measured(key: str):
    content = json.loads(FIGURES.read_text())
    full = list(jax_goals.goals(content))
    content[key]["rows"] = [
        {name: row[name] for name in ("case", "layout", "by") if name in row}
        | {"error": "ValueError: no"}
        for row in content[key]["rows"]
    ]
    results = list(jax_goals.goals(content))
    assert [goal.what for goal in results] == [goal.what for goal in full]
    differ = [after for before, after in zip(full, results, strict=True) if before != after]
    assert len(differ) == {"two_gpus": 4, "attention": 5}[key]
    assert all(goal.reached is None for goal in differ)


def test_two_devices_are_compared_with_one(tmp_path: Path, monkeypatch):
    def layer(layout, *sizes) -> float:
        if layout.name == "one":
            raise ValueError("out of memory")
        return 10.0

    monkeypatch.setattr(jax_ranks, "layer", layer)
    monkeypatch.setattr(
        sys,
        "argv",
        ["jax_ranks.py", str(tmp_path / "rows.json"), "--quick", "--layer", "--devices", "2"],
    )
    jax_ranks.main()
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {"error" in row for row in rows if row["layout"] == "one"} == {True}
    rest = [row for row in rows if row["layout"] != "one"]
    assert {row["eager_ms"] for row in rest} == {10.0}
    assert not any("speedup" in row for row in rest)


@pytest.mark.parametrize(("slowest", "reached"), [(40.0, False), (20.0, None), (None, None)])
def test_slowest_compilation_is_unknown_if_a_time_is_missing(slowest: float | None, reached):
    rows = [
        {"case": "failed", "provider": "jax", "compile_s": None, "error": "ValueError: no"},
        {"case": "slow", "provider": "jax", "compile_s": slowest},
        {"case": "plain", "provider": "xla", "compile_s": 99.0},
    ]
    results = list(jax_goals.goals({"results": [], "without_the_flag": {"results": rows}}))
    (goal,) = [goal for goal in results if goal.what.startswith("without the flag")]
    assert goal.reached is reached
    assert goal.note == (
        "slow" if reached is False else f"no time of failed{', slow' * (slowest is None)}"
    )


@pytest.mark.slow
def test_goals_are_plotted(tmp_path: Path, monkeypatch):
    options = ["--plot", str(tmp_path / "goals.png"), "--families", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["jax_goals.py", str(FIGURES), *options])
    before = FIGURES.read_bytes()
    jax_goals.main()
    assert {"goals.png", "dense.png", "layer.png"} <= {path.name for path in tmp_path.iterdir()}
    assert FIGURES.read_bytes() == before
