"""The script benchmarks/models.py: equal models in all arms, a run of tiny models, and the table of kernels."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch

import transformer_engine
from tests.support import programs

model_arms = importlib.import_module("model_arms")
model_trace = importlib.import_module("model_trace")
models = importlib.import_module("models")

TINY = model_arms.SIZES["tiny"]


def test_every_arm_has_a_model_of_equal_size():
    """Parameters of te and torch arms agree; 57M, 1B and 8Bx4 have the documented sizes."""
    counts = {
        arm: sum(
            p.numel() for p in model_arms.make_model(arm, TINY, "cpu", compiled=False).parameters()
        )
        for arm in ("te:bf16", "te:block", "pt:bf16")
    }
    assert len(set(counts.values())) == 1
    with pytest.raises(ValueError, match="arm 'te:none' is unknown; choose from te:bf16"):
        model_arms.make_model("te:none", TINY, "cpu")
    for name, millions in {"57M": 57, "1B": 1107, "8Bx4": 1141}.items():
        model = model_arms.TorchModel(model_arms.SIZES[name], "bf16", "meta", compiled=False)
        assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions


ENGINE_NAMES = {
    "norm1.weight": "self_attention.layernorm_qkv.layer_norm_weight",
    "qkv.weight": "self_attention.layernorm_qkv.weight",
    "out.weight": "self_attention.proj.weight",
    "norm2.weight": "layernorm_mlp.layer_norm_weight",
    "up.weight": "layernorm_mlp.fc1_weight",
    "down.weight": "layernorm_mlp.fc2_weight",
}


def test_layers_of_both_libraries_compute_the_same():
    """One key and value head, for which query, key and value have the same order in both weights."""
    torch.manual_seed(0)
    torch_model = model_arms.make_model("pt:bf16", TINY, "cpu", compiled=False)
    engine_model = model_arms.make_model("te:bf16", TINY, "cpu")
    for source, target in zip(torch_model.layers, engine_model.layers, strict=True):
        weights = {ENGINE_NAMES[name]: value for name, value in source.state_dict().items()}
        assert not target.load_state_dict(weights, strict=False).unexpected_keys
    x = torch.randn(TINY.batch, TINY.length, TINY.hidden, dtype=torch.bfloat16)
    expected, actual = torch_model.run_layers(x).float(), engine_model.run_layers(x).float()
    unit = 2**-8  # bfloat16's rounding; without the rotary positions the difference is 6.5 units
    assert (expected - actual).norm() < unit * expected.norm()


def test_options_of_the_engine_do_not_change_the_first_loss(emulated):
    losses = {}
    for arm in ("te:current", "te:current+columns", "te:current+cached", "te:current+loss"):
        torch.manual_seed(0)
        model = model_arms.make_model(arm, TINY, "cpu")
        torch.manual_seed(1)
        tokens, targets = torch.randint(TINY.vocabulary, (2, TINY.batch, TINY.length)).unbind()
        losses[arm] = model(tokens, targets).item()
    assert losses["te:current+columns"] == losses["te:current+cached"] == losses["te:current"]
    assert losses["te:current+loss"] == pytest.approx(losses["te:current"], rel=2**-8)
    assert isinstance(
        model_arms.make_model("te:current+head", TINY, "cpu").head,
        transformer_engine.pytorch.Linear,
    )


@pytest.mark.slow
def test_tiny_models_run_in_processes_of_their_own(tmp_path, monkeypatch, capsys):
    path = tmp_path / "models.json"
    options = ["--size", "tiny", "--eager", "--runs", "1", "--only", "bf16", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["models.py", *options])
    models.main()
    written = json.loads(path.read_text())
    rows = {row["arm"]: row for row in written["medians"]}
    assert list(rows) == ["te:bf16", "pt:bf16", "liger:bf16"]
    assert all(rows[arm]["tokens_per_second"] > 0 for arm in ("te:bf16", "pt:bf16"))
    assert "| tiny | te:bf16 |" in capsys.readouterr().out


def test_a_step_is_measured_and_traced_in_this_process(monkeypatch, capsys):
    step = importlib.import_module("model_step")
    monkeypatch.setattr(step, "WARM_UP", 1)
    monkeypatch.setattr(step, "BLOCKS", 1)
    monkeypatch.setattr(step, "BLOCK", 1)
    figures = step.measure_arm("te:current", TINY, "cpu", compiled=True, traced=False)
    assert figures["tokens_per_second"] == pytest.approx(1e3 * 64 / figures["step_ms"])
    assert (
        figures["peak_gib"] is figures["launches"] is None
        and figures["loss"] < figures["first_loss"]
    )
    assert figures["engine"] == transformer_engine.__version__
    assert step.measure_arm("pt:bf16", TINY, "cpu", compiled=False, traced=True)["kernels"] == []


def test_medians_name_the_error_of_an_arm():
    good = {
        "size": "1B",
        "arm": "te:bf16",
        "tokens_per_second": 3.0,
        "step_ms": 1.0,
        "peak_gib": 2.0,
    }
    good |= {"host_ms": 1.0, "launches": 5}
    rows = [good, good | {"tokens_per_second": 5.0}, good | {"tokens_per_second": 4.0}]
    failed = {"size": "1B", "arm": "pt:rowwise", "error": "ImportError: no torchao"}
    summary = models.medians([*rows, failed])
    assert [row["tokens_per_second"] for row in summary] == [4.0, None]
    assert models.table(summary).splitlines()[2:] == [
        "| 1B | te:bf16 | 4 | 1.00 | 2.00 | 1.00 | 5 |",
        "| 1B | pt:rowwise | - | - | - | - | - | ImportError: no torchao",
    ]


def test_kernels_belong_to_the_part_that_launched_them(monkeypatch):
    """Two marks, three launches before and after them; one kernel overlaps another."""

    def launch(number: int, ts: float) -> dict:
        return {
            "cat": "cuda_runtime",
            "name": "cudaLaunchKernel",
            "ts": ts,
            "dur": 1,
            "args": {"correlation": number},
        }

    def kernel(number: int, name: str, ts: float, dur: float) -> dict:
        return {
            "cat": "kernel",
            "name": name,
            "ts": ts,
            "dur": dur,
            "args": {"correlation": number},
        }

    def mark(part: str, ts: float, dur: float = 0.5) -> dict:
        return {"cat": "user_annotation", "name": model_trace.MARK + part, "ts": ts, "dur": dur}

    events = [
        *(mark("measured", 10, 20), mark("layers", 11), mark("head", 20)),
        *(launch(1, 5), launch(2, 12), launch(3, 14), launch(4, 25)),
        *(kernel(1, "earlier", 30, 9), kernel(2, "gemm", 40, 10), kernel(3, "cudnn_fmha", 45, 10)),
        kernel(4, "gemm", 60, 5),
    ]
    monkeypatch.setattr(
        model_trace, "_profile_step", lambda step, device: model_trace._last_step(events)
    )
    monkeypatch.setattr(model_trace, "clocks", lambda step: "1500, 2619, 690.0")
    table = model_trace.trace(lambda: None, "cuda")
    assert (table["wall_us"], table["kernel_us"], table["gap_us"]) == (25, 25, 5)
    assert [(row["group"], row["count"], row["us"], row["share"]) for row in table["groups"]] == [
        ("layers", 1, 10, 0.4),
        ("attention", 1, 10, 0.4),
        ("head", 1, 5, 0.2),
    ]
    assert [(row["group"], row["name"]) for row in table["kernels"]][-1] == ("head", "gemm")


@pytest.mark.slow
def test_tiny_sharded_models_train_on_two_ranks(tmp_path):
    """Codes of FP8 parameters are gathered in about half the bytes of bfloat16 weights."""
    path = tmp_path / "sharded.json"
    script = Path(models.__file__).with_name("sharded_models.py")
    arguments = [
        "--size",
        "tiny",
        "--eager",
        "--arms",
        "te:current",
        "te:current+codes",
        "--json",
        str(path),
    ]
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        *arguments,
    ]
    programs.output(command, script.parent.parent, os.environ, patience=300)
    values, codes = json.loads(path.read_text())["results"]
    assert [values["arm"], codes["arm"]] == ["te:current", "te:current+codes"]
    assert 0.5 < codes["gathered_mb"] / values["gathered_mb"] < 0.6
