"""`te train --framework jax`: same text and records as torch, exact continuation, and rejected options."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.support import forked
from tests.support.command import TINY, te
from tests.support.programs import ROOT, search_path
from transformer_engine_tools.demo import flax_checkpoint, flax_run, trainer
from transformer_engine_tools.demo.config import HIGH_PRECISION, RECIPES, RunConfig, resolve
from transformer_engine_tools.demo.data import Corpus, load_corpus
from transformer_engine_tools.demo.records import Progress, read_metrics
from transformer_engine_tools.demo.trainer import Trainer

SIZES = {
    "steps": 8,
    "batch": 2,
    "sequence": 32,
    "layers": 1,
    "hidden": 32,
    "heads": 1,
    "framework": "jax",
}
BATCHES = 4  # of an evaluation
TEXT = "".join(f"def function_{i}(x):\n    return x + {i}\n\n" for i in range(300))


def tiny(recipe: str = "delayed", **changes: Any) -> RunConfig:
    return resolve("cpu", {**SIZES, "recipe": recipe, **changes})


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture(scope="module")
def corpus(text: str) -> Corpus:
    return load_corpus(text, 32)


@pytest.fixture(autouse=True)
def _short_evaluations(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trainer, "EVALUATION_BATCHES", BATCHES)


class Killed(BaseException):
    """Ends a program between two checkpoints."""


def losses(history: list[Progress]) -> list[Any]:
    return [(record.step, record.loss, record.validation) for record in history]


def kill_after_step(step: int):
    def observe(record: Progress) -> None:
        if record.step == step:
            raise Killed

    return observe


def resume_run(config: RunConfig, corpus: Corpus, folder: Path) -> Trainer:
    resumed = Trainer(config, corpus, folder)
    resumed.load(flax_checkpoint.load(resumed.checkpoint_path))
    return resumed


def test_a_run_killed_in_the_middle_continues_bit_for_bit(corpus: Corpus, tmp_path: Path):
    full = Trainer(tiny(), corpus, tmp_path / "whole")
    assert full.train()
    killed = Trainer(tiny(), corpus, tmp_path / "killed")
    with pytest.raises(Killed):
        killed.train(kill_after_step(5))
    resumed = resume_run(tiny(), corpus, tmp_path / "killed")
    assert resumed.step == 4  # checkpoints are written after every quarter of the run
    assert resumed.train()
    assert losses(resumed.history) == losses(full.history)
    assert losses(read_metrics(resumed.metrics_path)) == losses(full.history)
    first, last = full.history[0].loss, full.history[-1].loss
    assert all(last[name] < first[name] - 0.1 for name in last)
    assert last["delayed"] != last[HIGH_PRECISION]
    validation = full.history[-1].validation or {}
    assert abs(validation["delayed"] / validation[HIGH_PRECISION] - 1) < 0.01


@pytest.mark.slow
def test_a_recipe_of_blocks_trains_near_high_precision(corpus: Corpus, tmp_path: Path):
    run = Trainer(tiny("mxfp8", steps=3), corpus, tmp_path)
    run.train()
    validation = run.history[-1].validation or {}
    assert 0 < abs(validation["mxfp8"] / validation[HIGH_PRECISION] - 1) < 0.01


@pytest.mark.parametrize("recipe", RECIPES[:-1])
@pytest.mark.sampled(2)
def test_the_step_of_every_recipe_traces_and_leaves_a_state_of_the_same_kind(recipe: str):
    config, key = tiny(recipe), jax.random.key(0)
    named = {"config": config, "name": recipe}
    before = jax.eval_shape(functools.partial(flax_run._initial_state, **named), key)
    batch = jax.ShapeDtypeStruct((config.batch, config.sequence), np.int32)
    rate = jax.ShapeDtypeStruct((), np.float32)
    after, loss = jax.eval_shape(
        functools.partial(flax_run._step, **named), before, batch, batch, rate, key
    )
    assert jax.tree.map(lambda leaf: leaf.shape, after) == jax.tree.map(
        lambda leaf: leaf.shape, before
    )
    assert (loss.shape, loss.dtype) == ((), np.float32)


def test_both_frameworks_train_on_the_same_batches_with_models_of_the_same_size(
    corpus: Corpus, tmp_path: Path
):
    pytest.importorskip("torch")
    ours = Trainer(tiny(), corpus, tmp_path)
    reference = Trainer(tiny(framework="torch"), corpus, tmp_path)
    assert ours.runs[HIGH_PRECISION].parameters == reference.runs[HIGH_PRECISION].parameters
    # The batch of a step depends on the text and on these settings alone.
    for setting in ("seed", "batch", "sequence"):
        assert getattr(ours.config, setting) == getattr(reference.config, setting)


# Trains, and continues as if the program had been killed while it replaced a checkpoint.
WITHOUT_TORCH = """
import sys
from pathlib import Path
sys.modules["torch"] = None
from tests.jax.compiled import compile_quickly
from transformer_engine_tools import main
from transformer_engine_tools.demo import trainer

def te_train(*arguments):
    sys.argv = ["te", "train", *arguments]
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code

folder, batches, *options = sys.argv[1:]
compile_quickly(True)
trainer.EVALUATION_BATCHES = int(batches)
te_train("--recipe", "none", "--out", folder, *options)
print("files:", *sorted(path.name for path in Path(folder, "none-jax").iterdir()))
checkpoint = Path(folder, "none-jax", "checkpoint")
checkpoint.rename(checkpoint.with_name("checkpoint.old"))
te_train("--resume", "--name", "none-jax", "--out", folder)
"""


@pytest.fixture(scope="module")
def trained_without_torch(text: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run `te train` in a process without torch; return its folder and output."""
    folder = tmp_path_factory.mktemp("without_torch")
    command = ["-c", WITHOUT_TORCH, str(folder), str(BATCHES), *TINY, "--data", text]
    environment = os.environ | {"PYTHONPATH": search_path(), "COLUMNS": "200"}
    return folder, forked.output(command, ROOT, environment, framework="jax")


def test_the_demonstration_trains_without_torch(trained_without_torch: tuple[Path, str]):
    _, output = trained_without_torch
    assert "in jax on cpu" in output


def test_the_command_writes_the_same_files_prints_the_same_table_and_continues(
    trained_without_torch: tuple[Path, str], tmp_path: Path
):
    written, output = trained_without_torch
    folder = tmp_path / "none-jax"
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    output, _, files = output.partition("files: ")
    assert files.splitlines()[0].split() == ["checkpoint", "loss.png", "metrics.jsonl"]
    for expected in (
        "in jax on cpu",
        "validation loss",
        "ratio",
        "tokens/s",
        "sample of the float32 model",
    ):
        assert expected in output
    assert [record.step for record in read_metrics(folder / "metrics.jsonl")] == [1, 2, 3, 4]
    # With torch installed, the folder selects the framework.
    repeated = te("train", "--resume", "--name", "none-jax", "--out", str(tmp_path))
    assert repeated.exit_code == 0, repeated.output
    command = [
        "train",
        "--framework",
        "jax",
        "--device",
        "cpu",
        "--recipe",
        "none",
        "--out",
        str(tmp_path),
    ]
    other = te(*command, "--resume", "--hidden", "64")
    assert other.exit_code == 2
    assert "--hidden 64 contradicts the checkpoint, which has 32" in other.output
    (folder / "checkpoint" / "about.json").write_text("{}")
    damaged = te(*command, "--resume")
    assert damaged.exit_code == 2
    assert "is not a checkpoint of te train: its 'config' is a NoneType" in damaged.output


def test_the_option_selects_jax_where_torch_is_installed(text: str, tmp_path: Path):
    command = ["train", "--framework", "jax", "--recipe", "none", "--out", str(tmp_path)]
    result = te(*command, *TINY, "--steps", "1", "--data", text)
    assert result.exit_code == 0, result.output
    assert f"in jax on {'cpu' if jax.default_backend() == 'cpu' else 'cuda'}" in result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--experts", "4"], "--experts needs the PyTorch model; remove it"),
        (["--optimizer", "fused_adam"], "--optimizer fused_adam needs the PyTorch model"),
        (["--graphs"], "--graphs, --offload-layers and --observe need the PyTorch model"),
        (["--resume"], "there is no checkpoint at"),
    ],
)
def test_options_that_the_flax_model_lacks_are_rejected(
    options: list[str], words: str, text: str, tmp_path: Path
):
    result = te(
        "train",
        "--framework",
        "jax",
        "--device",
        "cpu",
        "--data",
        text,
        "--out",
        str(tmp_path),
        *options,
    )
    assert result.exit_code == 2, result.output
    assert words in result.output


def test_a_missing_library_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, text: str, tmp_path: Path
):
    monkeypatch.setitem(sys.modules, "optax", None)
    result = te("train", "--framework", "jax", "--data", text, "--out", str(tmp_path))
    assert result.exit_code == 1
    assert (
        '--framework jax needs optax; install with pip install ".[cli-jax]" in a checkout'
        in result.output
    )
