"""`te plan` prints a plan as a table or as JSON, searches meshes, and reports invalid options."""

from __future__ import annotations

import json

import transformer_engine.pytorch as te_pytorch
from tests.support.command import te as run_te


def te(*arguments: str):
    return run_te("plan", *arguments)


def test_the_command_prints_the_result_of_the_function():
    options = ["--model", "llama-8b", "--devices", "64", "--tp", "2", "--cp", "2", "--fsdp", "16"]
    printed = te(*options, "--recipe", "current", "--json")
    assert printed.exit_code == 0, printed.output
    result = te_pytorch.plan("llama-8b", 64, tp=2, cp=2, fsdp=16, recipe="current")
    assert json.loads(printed.output) == json.loads(json.dumps(result.as_dict()))
    table = te(*options, "--recipe", "current")
    assert table.exit_code == 0 and table.output.strip() == str(result).strip()
    assert (
        "of the bfloat16 peak (989 TFLOP/s per device, which FP8 and FP4 products exceed)"
        in table.output
    )
    assert "predicted, not measured" in table.output and f"{result.step_ms:.2f} ms" in table.output


def test_options_reach_the_plan():
    base = [
        "--hidden",
        "2048",
        "--layers",
        "4",
        "--heads",
        "16",
        "--devices",
        "16",
        "--fsdp",
        "16",
        "--json",
    ]
    plain = json.loads(te(*base).output)
    slow = json.loads(te(*base, "--network", "1").output)
    alone = json.loads(te(*base, "--devices-per-host", "16").output)
    assert slow["exposed"]["fsdp"] > plain["exposed"]["fsdp"] > alone["exposed"]["fsdp"]
    repeated = json.loads(te(*base, "--recompute", "full", "--graphs", "--micro-batch", "2").output)
    assert repeated["recompute"] == "full" and repeated["micro_batch"] == 2
    assert repeated["memory"]["activations"] < plain["memory"]["activations"]


def test_a_search_prints_meshes_that_fit():
    options = [
        "--model",
        "llama-8b",
        "--devices",
        "8",
        "--recipe",
        "delayed",
        "--search",
        "--count",
        "2",
    ]
    result = json.loads(te(*options, "--json").output)
    assert len(result) == 2 and all(each["fits"] for each in result)
    assert result[0]["step_ms"] <= result[1]["step_ms"]
    printed = te(*options)
    assert (
        printed.exit_code == 0
        and "MFU" in printed.output
        and f"{result[1]['step_ms']:.1f}" in printed.output
    )


def test_invalid_options_exit_with_2_and_a_remedy():
    eight = ["--model", "llama-8b", "--devices", "8"]
    for options, words in (
        (
            ["--model", "llama-8b", "--devices", "3", "--tp", "2"],
            "give axes whose product divides devices",
        ),
        (["--model", "llama-9b", "--devices", "8"], "did you mean 'llama-8b'?"),
        ([*eight, "--gpu", "h300"], "choose from h100, h200, b200\n"),
        (
            ["--model", "llama-8b", "--devices", "8", "--gpu", "a100"],
            "has no measured rates; choose from h100",
        ),
        (
            ["--model", "llama-8b", "--devices", "8", "--recipe", "mxfp8"],
            "--recipe mxfp8 has no products on --gpu h100",
        ),
        ([*eight, "--recipe", "mxfp8"], "or use --gpu b200\n"),
        ([*eight, "--tp", "3"], "--dp 2 * --fsdp 1 * --tp 3"),
        (["--model", "mine", "--devices", "8"], "or give --hidden, --layers and --heads\n"),
        (
            ["--model", "llama-8b", "--devices", "16", "--seq", "1000", "--cp", "8"],
            "--seq 1000 is not divisible by 2 * --cp 16",
        ),
        ([*eight, "--network", "0"], "--network 0.0 of the links must be"),
        (["--model", "llama-405b", "--devices", "1", "--search"], "no mesh of 1 devices fits"),
    ):
        result = te(*options)
        assert result.exit_code == 2 and words in result.output, result.output


def test_a_plan_that_does_not_fit_names_the_options_first_and_exits_with_1():
    options = ["--model", "llama-70b", "--devices", "8", "--recipe", "delayed"]
    result = te(*options)
    assert result.exit_code == 1
    lines = [line for line in result.output.splitlines() if line]
    assert (
        lines[2].startswith("does not fit: needs")
        and "raise --fsdp, --tp or --pp, or use --recompute full" in lines[2]
    )
    assert "tokens/s" not in result.output and "times of GPUs with enough memory:" in result.output
    as_data = te(*options, "--json")
    assert as_data.exit_code == 1 and json.loads(as_data.output)["fits"] is False
    repeated = te(*options, "--recompute", "full")
    assert repeated.exit_code == 1 and "--recompute" not in repeated.output


def test_high_precision_has_the_name_of_te_train():
    options = ["--model", "llama-1b", "--devices", "1", "--json"]
    by_name = [
        json.loads(te(*options, *recipe).output)
        for recipe in ([], ["--recipe", "none"], ["--recipe", "bf16"])
    ]
    assert by_name[0] == by_name[1] == by_name[2] and by_name[0]["recipe"] == "none"
    assert "no recipe (bfloat16), on 1 x h100" in te(*options[:-1]).output
    assert "--recipe none|delayed|" in te("--help").output


def test_a_missing_model_is_reported_with_the_ways_to_name_one():
    result = te("--devices", "8", "--hidden", "512")
    assert result.exit_code == 2
    assert result.output.startswith("error: no model; give --model, one of llama-1b, ")
    assert result.output.rstrip().endswith("or --hidden, --layers and --heads")
    assert "custom, " in te("--devices=8", "--hidden=512", "--layers=2", "--heads=8").output
