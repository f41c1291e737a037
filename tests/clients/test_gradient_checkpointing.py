"""Hugging Face's gradient checkpointing under accelerate's FP8 layers and peft: the losses of a run without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import transformer_engine.pytorch as te
from tests.clients import installed
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling

pytestmark = [
    *installed.needs("accelerate", "transformers", "peft"),
    pytest.mark.usefixtures("emulated", "no_accelerator_of_another_test"),
]

STEPS = 6
# Keywords for torch.utils.checkpoint.
CHECKPOINTS = {"reentrant": {"use_reentrant": True}, "hooks": {"use_reentrant": False}}


@pytest.fixture
def no_accelerator_of_another_test():
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def create_adapted_llama(checkpoint: dict[str, Any] | None, dropout: float) -> Any:
    import peft

    model = installed.tiny_llama(attention_dropout=dropout)
    if checkpoint is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpoint)
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=8, lora_dropout=dropout, target_modules=["q_proj", "v_proj", "down_proj"]
    )
    adapted = peft.get_peft_model(model, config)
    adapted.enable_input_require_grads()  # pyright: ignore[reportCallIssue]
    return adapted.train()


class Calls:
    """Count calls to the first layer that belongs to this package."""

    def __init__(self, model: torch.nn.Module):
        self.number = 0
        first = next(
            module
            for module in model.modules()
            if isinstance(module, te.Linear | te.LayerNormLinear)
        )
        first.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.number += 1


def assert_equal(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> None:
    """The same bits; on a GPU, up to the order in which attention adds up its gradients."""
    assert len(expected) == len(actual) > 0
    for a, b in zip(expected, actual, strict=True):
        if a.is_cuda:
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
        else:
            assert torch.equal(a, b)


def train_adapters(
    recipe: dict[str, Any], checkpoint: dict[str, Any] | None, dropout: float = 0.1
) -> tuple[list[torch.Tensor], int]:
    """Train a Llama's adapters in FP8 with an Accelerator; return losses and layer calls."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import TERecipeKwargs

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(**recipe)])
    model = create_adapted_llama(checkpoint, dropout)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    calls = Calls(model)
    tokens = installed.tokens(accelerator.device)
    torch.manual_seed(2)

    def step() -> torch.Tensor:
        loss = model(tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return [step() for _ in range(STEPS)], calls.number


@pytest.mark.parametrize("checkpoint", CHECKPOINTS.values(), ids=CHECKPOINTS)
@pytest.mark.parametrize(
    "recipe",
    [{"fp8_format": "HYBRID", "amax_history_len": 4}, {"use_mxfp8_block_scaling": True}],
    ids=["delayed", "mxfp8"],
)
def test_adapters_train_with_the_losses_of_saved_activations(recipe, checkpoint):
    (expected, once), (actual, twice) = (
        train_adapters(recipe, None),
        train_adapters(recipe, checkpoint),
    )
    assert (once, twice) == (STEPS, 2 * STEPS)
    assert_equal(expected, actual)
    installed.assert_falls([loss.item() for loss in actual], 0.1)


def train_converted(
    recipe: Any, checkpoint: dict[str, Any] | None
) -> tuple[list[torch.Tensor], int]:
    """Train a Llama with this package's layers; return losses, last gradients and layer calls."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = te.convert_hf(installed.tiny_llama()).to(device).train()
    if checkpoint is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpoint)
    calls = Calls(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    tokens = installed.tokens(device)
    records = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with te.autocast(recipe=recipe):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        records.append(loss.detach())
    return records + [p.grad for p in model.parameters() if p.grad is not None], calls.number


@pytest.mark.parametrize("checkpoint", CHECKPOINTS.values(), ids=CHECKPOINTS)
@pytest.mark.parametrize("recipe", [Float8CurrentScaling, DelayedScaling, MXFP8BlockScaling])
@pytest.mark.sampled(2)
def test_a_converted_llama_has_the_bits_of_saved_activations(recipe, checkpoint):
    (expected, once), (actual, twice) = (
        train_converted(recipe(), None),
        train_converted(recipe(), checkpoint),
    )
    assert (once, twice) == (STEPS, 2 * STEPS)
    assert_equal(expected, actual)
