"""Training: exact continuation, stopping, and checkpoints that are whole and harmless."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine_tools.demo import checkpoint
from transformer_engine_tools.demo import optimizer as optimizers
from transformer_engine_tools.demo import trainer as trainers
from transformer_engine_tools.demo.config import (
    HIGH_PRECISION,
    RECIPES,
    Execution,
    RunConfig,
    resolve,
)
from transformer_engine_tools.demo.data import Corpus, load_corpus
from transformer_engine_tools.demo.plot import plot_losses, smooth
from transformer_engine_tools.demo.records import Progress, read_metrics, summarize
from transformer_engine_tools.demo.trainer import Trainer

SIZES: dict[str, Any] = {
    "steps": 6,
    "batch": 2,
    "sequence": 32,
    "layers": 1,
    "hidden": 32,
    "heads": 1,
}


def tiny(recipe: str = "delayed", **changes: Any) -> RunConfig:
    return resolve("cpu", {**SIZES, "recipe": recipe, **changes})


@pytest.fixture(autouse=True)
def _short_evaluation(monkeypatch: pytest.MonkeyPatch):
    """Evaluate 4 batches instead of 32, which take most of a run's time."""
    monkeypatch.setattr(trainers, "EVALUATION_BATCHES", 4)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("".join(f"def function_{i}(x):\n    return x + {i}\n\n" for i in range(300)))
    return load_corpus(str(text), 32)


def losses(history: list[Progress]) -> list[Any]:
    return [(record.step, record.loss, record.validation) for record in history]


def stop_after(step: int, trainer: Trainer):
    return lambda: trainer.step >= step


# One recipe with a state, one of blocks whose rounding draws random numbers, and high precision.
ALWAYS = ("delayed", "nvfp4", "none")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(one, marks=() if one in ALWAYS else pytest.mark.slow) for one in RECIPES],
)
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(
    recipe: str, corpus: Corpus, tmp_path: Path
):
    with te.emulate():  # a GPU without the format computes it on request only
        full = Trainer(tiny(recipe), corpus, tmp_path / "whole")
        assert full.train()
        first = Trainer(tiny(recipe), corpus, tmp_path / "parts")
        assert not first.train(stop=stop_after(3, first))
        second = Trainer(tiny(recipe), corpus, tmp_path / "parts")
        second.load(checkpoint.load(second.checkpoint_path))
        assert second.step == 3
        assert second.train()
    assert losses(second.history) == losses(full.history)
    assert losses(read_metrics(second.metrics_path)) == losses(full.history)


def test_both_runs_start_from_the_same_weights(corpus: Corpus, tmp_path: Path):
    trainer = Trainer(tiny(), corpus, tmp_path)
    quantized, high = (trainer.runs[name].model for name in ("delayed", HIGH_PRECISION))
    pairs = zip(quantized.parameters(), high.parameters(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)


def test_training_lowers_the_loss_and_the_recipe_changes_it(corpus: Corpus, tmp_path: Path):
    trainer = Trainer(tiny("current", steps=12), corpus, tmp_path)
    trainer.train()
    first, last = trainer.history[0].loss, trainer.history[-1].loss
    assert all(last[name] < first[name] - 0.1 for name in last)
    assert last["current"] != last[HIGH_PRECISION]


def test_a_recipe_that_does_not_run_here_is_rejected_before_training(
    corpus: Corpus, tmp_path: Path
):
    if torch.cuda.is_available():
        pytest.skip("a GPU may have the format")
    with (
        te.emulate(False),
        pytest.raises(ValueError, match=r"recipe mxfp8 does not run here: .* TE_EMULATE=1"),
    ):
        Trainer(tiny("mxfp8"), corpus, tmp_path)


def test_metrics_beyond_the_checkpoint_are_dropped(corpus: Corpus, tmp_path: Path):
    trainer = Trainer(tiny("none"), corpus, tmp_path)
    trainer.train(stop=stop_after(2, trainer))
    ahead = Progress(
        step=3, learning_rate=0.0, loss={HIGH_PRECISION: 0.0}, seconds={HIGH_PRECISION: 0.0}
    )
    with trainer.metrics_path.open("a") as metrics:
        metrics.write(ahead.as_json() + '{"step": 4, "lo')
    resumed = Trainer(tiny("none"), corpus, tmp_path)
    resumed.load(checkpoint.load(resumed.checkpoint_path))
    assert [record.step for record in read_metrics(resumed.metrics_path)] == [1, 2]


def test_another_text_is_rejected(corpus: Corpus, tmp_path: Path):
    trainer = Trainer(tiny("none"), corpus, tmp_path)
    trainer.train(stop=stop_after(1, trainer))
    state = checkpoint.load(trainer.checkpoint_path)
    other = Corpus(corpus.train, corpus.validation, "other", "elsewhere.txt")
    with pytest.raises(
        ValueError, match=r"elsewhere.txt is not the one this checkpoint was trained on"
    ):
        Trainer(tiny("none"), other, tmp_path).load(state)


def test_a_missing_checkpoint_is_named(tmp_path: Path):
    with pytest.raises(
        ValueError, match=r"there is no checkpoint at .*checkpoint; leave --resume out"
    ):
        checkpoint.load(tmp_path / "checkpoint")


def test_a_failed_write_keeps_the_old_checkpoint(corpus: Corpus, tmp_path: Path):
    trainer = Trainer(tiny("none"), corpus, tmp_path)
    trainer.train(stop=stop_after(1, trainer))
    path = trainer.checkpoint_path
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        checkpoint.save(path, {"step": lambda: 2})
    assert checkpoint.load(path)["step"] == 1


class Exploit:
    """Would touch a file when unpickled by an unrestricted loader."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_a_hostile_checkpoint_runs_nothing(tmp_path: Path):
    path, evidence = tmp_path / "checkpoint", tmp_path / "evidence"
    torch.save({"step": Exploit(evidence)}, path)
    with pytest.raises(ValueError, match="is not a checkpoint of te train"):
        checkpoint.load(path)
    assert not evidence.exists()


def test_the_summary_averages_the_last_steps():
    config = tiny("current", steps=20)
    history = [
        Progress(
            step,
            1e-3,
            {"current": float(step), HIGH_PRECISION: 1.0},
            {"current": 0.5, HIGH_PRECISION: 0.25},
        )
        for step in range(1, 20)
    ]
    history.append(
        Progress(20, 1e-3, {"current": 20.0, HIGH_PRECISION: 1.0}, {"current": 0.5, HIGH_PRECISION: 0.25},
                 {"current": 3.0, HIGH_PRECISION: 2.0})
    )  # fmt: skip
    quantized, high = summarize(config, history)
    assert (quantized.train, high.train) == (15.5, 1.0)
    assert (quantized.validation, high.validation) == (3.0, 2.0)
    assert quantized.tokens_per_second == pytest.approx(64 / 0.5)
    assert high.seconds == pytest.approx(5.0)


@pytest.mark.parametrize("recipe", ["current", "none"])
def test_the_plot_is_a_picture_of_readable_size(recipe: str, tmp_path: Path):
    config = tiny(recipe)
    names = config.runs
    history = [
        Progress(step, 1e-3, dict.fromkeys(names, 5.0 / step), dict.fromkeys(names, 0.1))
        for step in range(1, 5)
    ]
    history.append(
        Progress(
            5, 1e-3, dict.fromkeys(names, 1.0), dict.fromkeys(names, 0.1), dict.fromkeys(names, 1.1)
        )
    )
    plot_losses(tmp_path / "loss.png", config, history)
    header = (tmp_path / "loss.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(header[16:20], "big") >= 1000


def test_smoothing_keeps_a_linear_curve_except_at_its_ends():
    line = [float(i) for i in range(200)]
    assert smooth(line)[3:-3] == pytest.approx(line[3:-3])
    # the mean of the four values that the window still covers
    assert smooth(line)[0] == pytest.approx(1.5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "execution",
    [Execution(graphs=True), Execution(offload_layers=1), Execution(observe=True)],
    ids=["graphs", "offload", "observe"],
)
@pytest.mark.filterwarnings("ignore:CPU offload", "ignore:num_layers")
def test_execution_options_do_not_change_the_losses(
    execution: Execution, corpus: Corpus, tmp_path: Path
):
    config = replace(tiny("delayed", steps=3), layers=2)
    plain, other = (
        Trainer(config, corpus, tmp_path / name, how)
        for name, how in (("plain", Execution()), ("other", execution))
    )
    plain.train()
    other.train()
    assert [record.loss for record in other.history] == [record.loss for record in plain.history]
    assert [record.validation for record in other.history] == [
        record.validation for record in plain.history
    ]


def test_an_observed_run_logs_the_first_of_ten_steps(corpus: Corpus, tmp_path: Path):
    trainer = Trainer(tiny("current", steps=11), corpus, tmp_path, Execution(observe=True))
    trainer.train()
    lines = [json.loads(line) for line in trainer.observation_path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 11]
    observed = {tensor["module"] for tensor in lines[0]["tensors"] if tensor["format"]}
    assert observed == {
        f"layers.0.{name}"
        for name in ("self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp")
    }
    assert lines[0]["first_nonfinite"] is None


@pytest.mark.parametrize(
    ("execution", "message"),
    [
        (
            Execution(offload_layers=1),
            "--offload-layers 1 is outside 0 to 0: the last of 1 layers stays on the GPU",
        ),
        (Execution(offload_layers=-1), "--offload-layers -1 is outside 0 to 0"),
        (Execution(graphs=True, observe=True), "--graphs and --observe exclude each other"),
    ],
)
def test_incompatible_execution_options_are_rejected(
    execution, message: str, corpus: Corpus, tmp_path: Path
):
    with pytest.raises(ValueError, match=message):
        Trainer(tiny("none"), corpus, tmp_path, execution)


def test_fused_adam_trains_as_adamw_does(corpus: Corpus, tmp_path: Path):
    """Up to rounding: the sums of a step have another order."""
    trained = {}
    for optimizer in ("adamw", "fused_adam"):
        trainer = Trainer(tiny("none", steps=8, optimizer=optimizer), corpus, tmp_path / optimizer)
        trainer.train()
        trained[optimizer] = torch.tensor(
            [next(iter(record.loss.values())) for record in trainer.history]
        )
    torch.testing.assert_close(trained["fused_adam"], trained["adamw"], rtol=1e-4, atol=0)


def test_a_run_of_fused_adam_continues_exactly(corpus: Corpus, tmp_path: Path):
    config = tiny("delayed", optimizer="fused_adam")
    full = Trainer(config, corpus, tmp_path / "whole")
    full.train()
    first = Trainer(config, corpus, tmp_path / "parts")
    first.train(stop=stop_after(3, first))
    second = Trainer(config, corpus, tmp_path / "parts")
    second.load(checkpoint.load(second.checkpoint_path))
    second.train()
    assert losses(second.history) == losses(full.history)


def test_a_state_of_the_other_optimizer_is_rejected(corpus: Corpus, tmp_path: Path):
    trainer = Trainer(tiny("none"), corpus, tmp_path)
    trainer.train(stop=stop_after(1, trainer))
    state = checkpoint.load(trainer.checkpoint_path)
    with pytest.raises(ValueError, match="its optimizer has no fused_adam"):
        Trainer(tiny("none", optimizer="fused_adam"), corpus, tmp_path).load(state)


@pytest.mark.parametrize("gpu", [None, torch.device("meta")])
def test_learning_rates_are_kept_on_the_gpu_of_the_parameters(gpu):
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=0.25)
    optimizers._keep_rates_on_device(adam, gpu)
    (group,) = adam.param_groups
    assert group["capturable"] == (gpu is not None)
    assert group["lr"] == 0.25 if gpu is None else group["lr"].device == gpu
