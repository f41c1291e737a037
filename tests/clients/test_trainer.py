"""The published transformers Trainer trains Llamas in FP8, with accelerate's and convert_hf's layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import transformer_engine.pytorch as te
from tests.clients import installed
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

pytestmark = [
    *installed.needs("transformers", "accelerate"),
    installed.EMULATED,
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def no_state_of_another_test():
    from accelerate.state import AcceleratorState, PartialState

    yield
    AcceleratorState._reset_state(True)
    PartialState._reset_state()


def trainer(model: nn.Module, folder: Path, **settings: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in installed.tokens(batch=4)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        report_to=[],
        logging_steps=1,
        per_device_train_batch_size=4,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        save_strategy="no",
        disable_tqdm=True,
        max_grad_norm=0.0,
        **settings,
    )
    return Trainer(model=model, args=arguments, train_dataset=rows)


def loss_log(run: Any) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def test_accelerate_s_fp8_trains(tmp_path, monkeypatch):
    """`accelerate launch --mixed_precision fp8` sets this variable."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    run = trainer(installed.tiny_llama(), tmp_path, max_steps=8)
    run.train()
    assert run.accelerator.fp8_backend == "TE"
    assert any(isinstance(module, te.Linear) for module in run.model.modules())
    installed.assert_falls(loss_log(run))


@pytest.mark.parametrize(
    "recipe",
    [None, DelayedScaling(), Float8CurrentScaling()],
    ids=["high precision", "delayed", "current"],
)
@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.sampled(3)
def test_a_converted_model_trains(recipe, recomputed, tmp_path):
    model = te.convert_hf(installed.tiny_llama(), recipe=recipe)
    run = trainer(model, tmp_path, max_steps=8, gradient_checkpointing=recomputed)
    run.train()
    installed.assert_falls(loss_log(run))
    assert torch.isfinite(torch.tensor(run.evaluate(run.train_dataset)["eval_loss"]))


def test_a_converted_model_trains_as_the_stock_one(tmp_path):
    stock = trainer(installed.tiny_llama(), tmp_path, max_steps=6)
    stock.train()
    ours = trainer(te.convert_hf(installed.tiny_llama()), tmp_path, max_steps=6)
    ours.train()
    assert loss_log(ours) == pytest.approx(loss_log(stock), rel=1e-4)


def test_a_checkpoint_is_read_by_both(tmp_path):
    """A stock model continues half of a converted training from the Trainer's own checkpoint."""
    from transformers import LlamaForCausalLM

    run = trainer(te.convert_hf(installed.tiny_llama()), tmp_path / "run", max_steps=4)
    run.train()
    run.save_model(str(tmp_path / "model"))
    stock = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    tokens = installed.tokens()
    te.revert_hf(run.model.cpu().eval())
    assert torch.equal(stock(tokens).logits, run.model(tokens).logits)


def test_a_converted_training_resumes(tmp_path):
    full = trainer(te.convert_hf(installed.tiny_llama()), tmp_path / "whole", max_steps=6)
    full.train()
    arguments = {"max_steps": 6, "save_steps": 3}
    first = trainer(te.convert_hf(installed.tiny_llama()), tmp_path / "half", **arguments)
    first.args.save_strategy = "steps"
    first.train()
    repeated = trainer(te.convert_hf(installed.tiny_llama()), tmp_path / "half", max_steps=6)
    repeated.train(resume_from_checkpoint=str(tmp_path / "half" / "checkpoint-3"))
    assert loss_log(repeated) == pytest.approx(loss_log(full), rel=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "recipe", [DelayedScaling(), Float8CurrentScaling()], ids=["delayed", "current"]
)
def test_a_converted_model_trains_in_bf16_on_a_gpu(recipe, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    model = te.convert_hf(installed.tiny_llama(**sizes).to(torch.bfloat16), recipe=recipe)
    run = trainer(model, tmp_path, max_steps=8, bf16=True)
    run.train()
    assert all(parameter.is_cuda for parameter in run.model.parameters())
    installed.assert_falls(loss_log(run))
