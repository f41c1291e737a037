"""The scripts of benchmarks/: they import, choose cases, stop without a GPU, and write records of the machine."""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import NamedTuple

import pytest
import record
import torch

import transformer_engine.pytorch as te

SCRIPTS = sorted(path.stem for path in (Path(__file__).parents[2] / "benchmarks").glob("*.py"))
ON_A_GPU = sorted(
    {
        "cast_plans",
        "decode",
        "epilogues",
        "expert_step",
        "fused",
        "grouped_linear",
        "kv_cache",
        "norms",
        "products",
        "quantize",
    }
)


class Case(NamedTuple):
    name: str


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_imports(name):
    if name.startswith("jax_"):
        pytest.importorskip("jax")
    assert importlib.import_module(name).__doc__


@pytest.mark.parametrize("name", ON_A_GPU)
def test_a_script_that_needs_a_gpu_reports_it(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    with pytest.raises(
        SystemExit, match=r"need a CUDA device; torch.cuda.is_available\(\) is False"
    ):
        importlib.import_module(name).main()


def test_figures_are_written_with_the_machine_and_command(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/norms.py", "--json", "x"])
    record.write(
        tmp_path / "figures.json",
        record.machine(library="1.2"),
        cases=[{"case": "a", "gpu_ms": 1.0}],
    )
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written["cases"] == [{"case": "a", "gpu_ms": 1.0}]
    assert written["machine"]["command"] == "norms.py --json x"
    assert (
        written["machine"]["torch"] == torch.__version__ and written["machine"]["library"] == "1.2"
    )
    record.write(None, cases=[])


def test_only_selects_cases_whose_name_contains_the_text():
    cases = [Case("linear bf16"), Case("linear fp8"), Case("norm")]
    assert list(record.select_cases(cases, "linear")) == cases[:2]
    assert list(record.select_cases(cases, "")) == cases


def test_no_script_times_by_itself():
    """Only transformer_engine_tools.bench.measure and `shortest` take times; `shortest` takes those of any checkout."""
    folder = Path(record.__file__).parent
    timing = {
        *(
            "convergence",
            "convert",
            "finetune",
            "model_step",
            "recipe_table",
            "train_switches",
        ),  # training runs
        *(
            "context_parallel",
            "jax_ranks",
            "sharded_models",
            "expert_ranks",
        ),  # steps on several devices at once
        "jax_memory",  # tracing, lowering and compiling one program
        "shortest",
    }
    for name in set(SCRIPTS) - timing:
        source = (folder / f"{name}.py").read_text()
        assert "elapsed_time" not in source and "cuda.Event" not in source, name
        # `products` times the tuning of a product.
        assert source.count("perf_counter") <= (2 if name == "products" else 0), name


def test_a_step_of_experts_names_why_a_recipe_is_left_out():
    step = importlib.import_module("expert_step").Step
    with te.emulate(False):
        assert step("bf16", "none", 128, 32).unsupported_reason() is None
        unsupported = step("mxfp8", "mxfp8", 128, 32).unsupported_reason()
    if unsupported is not None or not torch.cuda.is_available():
        assert "Set TE_EMULATE=1" in unsupported


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:CPU offload")
def test_switches_that_leave_the_losses_alone_do_in_the_table(tmp_path, monkeypatch):
    (text := tmp_path / "text.txt").write_text(
        "\n".join(f"def function_{i}(x): return {i}" for i in range(900))
    )
    path = tmp_path / "switches.json"
    script = importlib.import_module("train_switches")
    options = [
        "--small",
        "--deterministic",
        "--steps",
        "3",
        "--data",
        str(text),
        "--json",
        str(path),
    ]
    monkeypatch.setattr(sys, "argv", ["train_switches.py", *options])
    monkeypatch.setitem(script.SIZES, "cpu", {**script.SIZES["cpu"], "hidden": 32, "heads": 1})
    script.main()
    rows = {row["variant"]: row for row in json.loads(path.read_text())["rows"]}
    assert set(rows) == {variant.name for variant in script.variants(3)}
    assert rows["graphs"]["loss"] == rows["offload-layers 1"]["loss"] == rows["observe"]["loss"]
    assert (
        rows["graphs"]["loss"]
        == rows["plain"]["loss"]
        == rows["plain, again"]["loss"]
        != rows["high_precision"]["loss"]
    )
    assert all(row["tokens_s"] > 0 for row in rows.values())


def test_a_queue_trains_each_arm_after_its_baseline():
    table = importlib.import_module("recipe_table")
    queue = ["tiny:adam-block:0:40", "tiny:current:1", "tiny:adam:0:40"]
    names = [job.name for job in table.queued_jobs(queue)]
    native = table.NATIVE_STEPS
    assert names == [
        "tiny-bfloat16-40-0",
        "tiny-adam-block-40-0",
        f"tiny-bfloat16-{native}-1",
        f"tiny-current-{native}-1",
        "tiny-adam-40-0",
    ]


@pytest.mark.parametrize("name", ["tiny:adam", "tiny:adam:x", "huge:adam:0", "tiny:adam:0:1:2"])
def test_a_queued_name_of_another_form_is_an_error(name):
    with pytest.raises(ValueError, match=name):
        importlib.import_module("recipe_table").queued_jobs([name])


def test_earlier_records_of_the_same_text_are_continued(tmp_path, capsys):
    table = importlib.import_module("recipe_table")

    def record(seed, text):
        config = {"steps": 40}
        return {"size": "tiny", "arm": "adam", "seed": seed, "config": config} | {
            "text": {"fingerprint": text}
        }

    file = tmp_path / "earlier.json"
    file.write_text(json.dumps({"records": [record(0, "a"), record(1, "a"), record(2, "b")]}))
    (folder := tmp_path / "records").mkdir()
    (folder / "tiny-adam-40-1.json").write_text("newer")
    corpus = types.SimpleNamespace(fingerprint="a", source="the text")
    table.take_earlier(folder, file, corpus)
    assert json.loads((folder / "tiny-adam-40-0.json").read_text()) == record(0, "a")
    assert (folder / "tiny-adam-40-1.json").read_text() == "newer"
    assert not (folder / "tiny-adam-40-2.json").exists()
    assert "1 records of" in capsys.readouterr().out


def test_training_figures_are_a_table_with_failed_arms():
    table = importlib.import_module("finetune").table
    rows = [
        {"arm": "te:stochastic", "tokens_per_step": 8192, "tokens_per_second": 12345.6}
        | {"step_ms": 663.6, "peak_gib": 66.123, "planned_gib": 66.5},
        {"arm": "ao:AdamWFp8", "error": "exit status 1"},
    ]
    lines = table(rows).splitlines()
    assert lines[2] == "| te:stochastic | 8,192 | 12,346 | 663.6 | 66.12 | 66.50 |"
    assert lines[3] == "| ao:AdamWFp8 | exit status 1 | - | - | - | - |"


def test_training_figures_of_earlier_runs_are_kept_unless_an_arm_runs_again():
    merge = importlib.import_module("finetune").merge_rows
    first = {"machine": "a", "rows": [{"arm": "ao:AdamWFp8", "batch": 1, "step_ms": 2.0}]}
    second = {"machine": "b", "rows": [{"arm": "te:block", "batch": 1, "step_ms": 3.0}]}
    rows = merge([first, second], [{"arm": "te:block", "batch": 2, "machine": "c"}])
    assert [(row["arm"], row["batch"], row["machine"]) for row in rows] == [
        ("te:block", 1, "b"),
        ("te:block", 2, "c"),
        ("ao:AdamWFp8", 1, "a"),
    ]
    again = merge([first], [{"arm": "ao:AdamWFp8", "batch": 1, "machine": "c"}])
    assert again == [{"arm": "ao:AdamWFp8", "batch": 1, "machine": "c"}]
