"""accelerate as published trains Llamas in FP8 with this engine's layers, saves them, and resumes bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import transformer_engine.pytorch as te
from tests.clients import installed

pytestmark = [*installed.needs("accelerate", "transformers"), installed.EMULATED]

RECIPES = {
    "hybrid": {"fp8_format": "HYBRID", "amax_history_len": 16, "amax_compute_algo": "max"},
    "e4m3": {"fp8_format": "E4M3", "margin": 1},
    "mxfp8": {"use_mxfp8_block_scaling": True},
}


@pytest.fixture(autouse=True)
def no_state_of_another_test():
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


class Training:
    """Prepare a model for FP8 with an Accelerator, and run one step."""

    def __init__(self, recipe: str, convert: bool = False, **settings: Any):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
        from accelerate.utils import TERecipeKwargs

        AcceleratorState._reset_state(True)
        handlers = [TERecipeKwargs(**RECIPES[recipe])]
        self.accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=handlers)
        model = installed.tiny_llama(**settings)
        if convert:
            model = te.convert_hf(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.tokens = installed.tokens(self.accelerator.device)

    def step(self) -> torch.Tensor:
        loss = self.model(self.tokens, labels=self.tokens).loss
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.sampled(1)
def test_a_llama_trains_on_this_engine_s_layers(recipe):
    run = Training(recipe)
    kinds = {type(module) for module in run.model.modules()}
    assert te.Linear in kinds and torch.nn.Linear not in kinds
    installed.assert_falls(installed.losses(run.step, 8))


def test_the_recipes_quantize():
    """E4M3 and HYBRID differ in gradients alone, so that first losses are equal and second ones are not."""
    first, second = (installed.losses(Training(recipe).step, 3) for recipe in ("hybrid", "e4m3"))
    assert first[1:] != second[1:]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("convert", [False, True], ids=["accelerate's layers", "convert_hf"])
def test_a_saved_training_resumes_bit_for_bit(recipe, convert, tmp_path):
    run = Training(recipe, convert=convert)
    installed.losses(run.step, 3)
    run.accelerator.save_state(tmp_path / "state")
    expected = installed.losses(run.step, 3)
    repeated = Training(recipe, convert=convert)
    repeated.accelerator.load_state(tmp_path / "state")
    assert installed.losses(repeated.step, 3) == expected


def test_a_converted_model_keeps_its_layers():
    run = Training("hybrid", convert=True)
    assert type(run.model.model.layers[0].mlp) is te.LayerNormMLP
    installed.assert_falls(installed.losses(run.step, 8))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["hybrid", "e4m3"])
@pytest.mark.parametrize("convert", [False, True], ids=["accelerate's layers", "convert_hf"])
def test_a_gpu_trains_in_fp8(recipe, convert):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    run = Training(recipe, convert=convert, **sizes)
    assert all(parameter.is_cuda for parameter in run.model.parameters())
    values = installed.losses(run.step, 8)
    installed.assert_falls(values)
    states = [module.fp8_meta for module in run.model.modules() if isinstance(module, te.Linear)]
    assert all(state["scaling_fwd"].amax_history.any() for state in states)
