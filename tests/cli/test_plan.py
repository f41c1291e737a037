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
    made = te_pytorch.plan("llama-8b", 64, tp=2, cp=2, fsdp=16, recipe="current")
    assert json.loads(printed.output) == json.loads(json.dumps(made.as_dict()))
    table = te(*options, "--recipe", "current")
    assert table.exit_code == 0 and table.output.strip() == str(made).strip()
    assert "predicted, not measured" in table.output and f"{made.step_ms:.2f} ms" in table.output


def test_options_reach_the_plan():
    base = ["--hidden", "2048", "--layers", "4", "--heads", "16", "--devices", "16", "--fsdp", "16", "--json"]
    plain = json.loads(te(*base).output)
    slow = json.loads(te(*base, "--network", "1").output)
    alone = json.loads(te(*base, "--devices-per-host", "16").output)
    assert slow["exposed"]["fsdp"] > plain["exposed"]["fsdp"] > alone["exposed"]["fsdp"]
    again = json.loads(te(*base, "--recompute", "full", "--graphs", "--micro-batch", "2").output)
    assert again["recompute"] == "full" and again["micro_batch"] == 2
    assert again["memory"]["activations"] < plain["memory"]["activations"]


def test_a_search_prints_meshes_that_fit():
    options = ["--model", "llama-8b", "--devices", "8", "--recipe", "delayed", "--search", "--count", "2"]
    found = json.loads(te(*options, "--json").output)
    assert len(found) == 2 and all(each["fits"] for each in found)
    assert found[0]["step_ms"] <= found[1]["step_ms"]
    printed = te(*options)
    assert (
        printed.exit_code == 0 and "MFU" in printed.output and f"{found[1]['step_ms']:.1f}" in printed.output
    )


def test_invalid_options_exit_with_2_and_a_remedy():
    for options, words in (
        (["--model", "llama-8b", "--devices", "3", "--tp", "2"], "give axes whose product divides devices"),
        (["--model", "llama-9b", "--devices", "8"], "did you mean 'llama-8b'?"),
        (["--model", "llama-8b", "--devices", "8", "--gpu", "h300"], "choose from h100, h200, b200"),
        (["--model", "llama-8b", "--devices", "8", "--network", "0"], "network=0.0 of the links must be"),
        (["--model", "llama-405b", "--devices", "1", "--search"], "no mesh of 1 devices fits"),
    ):
        result = te(*options)
        assert result.exit_code == 2 and words in result.output, result.output
