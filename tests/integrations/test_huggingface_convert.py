"""Parts of convert_hf without transformers: tensor names, angles, the loss, the recipe around a forward."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.pytorch as te
from transformer_engine.common import optional
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.conversion import DecoderConfig
from transformer_engine.pytorch.integrations.huggingface.convert import causal_loss
from transformer_engine.pytorch.integrations.huggingface.hooks import (
    enter_recipe,
    leave_recipe,
    return_angles,
    return_cosines,
)
from transformer_engine.pytorch.integrations.huggingface.layer_names import LayerNames
from transformer_engine.pytorch.quantization.autocast import current

_SIZES = {
    "vocabulary": 8,
    "hidden": 6,
    "feed_forward": 5,
    "layers": 1,
    "heads": 4,
    "groups": 2,
    "head_size": 3,
}
DECODER = DecoderConfig(**_SIZES, positions=8, windows=(None,))
SHAPES = {
    "input_layernorm.weight": (6,), "post_attention_layernorm.weight": (6,), "self_attn.q_proj.weight": (12, 6),
    "self_attn.k_proj.weight": (6, 6), "self_attn.v_proj.weight": (6, 6), "self_attn.o_proj.weight": (6, 12),
    "self_attn.q_norm.weight": (3,), "mlp.gate_proj.weight": (5, 6), "mlp.up_proj.weight": (5, 6),
    "mlp.down_proj.weight": (6, 5),
}  # fmt: skip


@pytest.mark.parametrize("prefix", ["", "model.layers.3."])
def test_names_are_converted_both_ways(prefix):
    reference = {prefix + name: torch.randn(shape) for name, shape in SHAPES.items()}
    names = LayerNames.of("qwen3", DECODER)
    state: dict[str, Any] = dict(reference)
    names.to_ours(state, prefix)
    assert {name.removeprefix(prefix) for name in state} == {
        "self_attn.layernorm_qkv.layer_norm_weight",
        "self_attn.layernorm_qkv.weight",
        "self_attn.o_proj.weight",
        "self_attn.q_norm.weight",
        "mlp.layer_norm_weight",
        "mlp.fc1_weight",
        "mlp.fc2_weight",
    }
    qkv = state[f"{prefix}self_attn.layernorm_qkv.weight"]
    # the first group's two heads
    assert torch.equal(qkv[:6], reference[f"{prefix}self_attn.q_proj.weight"][:6])
    assert torch.equal(qkv[6:9], reference[f"{prefix}self_attn.k_proj.weight"][:3])
    names.to_theirs(state, prefix)
    assert set(state) == set(reference)
    assert all(torch.equal(state[name], value) for name, value in reference.items())
    storages = [value.untyped_storage().data_ptr() for value in state.values()]
    assert len(set(storages)) == len(storages)


def test_an_incomplete_state_is_unchanged():
    state: dict[str, Any] = {"self_attn.q_proj.weight": torch.zeros(12, 6), "other": 1}
    before = dict(state)
    LayerNames.of("llama", DECODER).to_ours(state)
    LayerNames.of("llama", DECODER).to_theirs(state)
    assert state == before


class Rotary(nn.Module):
    """Imitates transformers' rotary embeddings with an attention factor."""

    attention_scaling = 1.25

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        frequency = 100.0 ** (-torch.arange(4) / 4)
        angles = (position_ids[..., None] * frequency).repeat(1, 1, 2)
        factor = self.attention_scaling
        return (angles.cos() * factor).to(x.dtype), (angles.sin() * factor).to(x.dtype)


def test_angles_have_the_library_s_cosines_in_float32():
    rotary = Rotary()
    x, places = torch.zeros(2, 50, 8, dtype=torch.bfloat16), torch.arange(50)[None] * 37
    exact = rotary(x.float(), position_ids=places)
    rounded = rotary(x, position_ids=places)
    return_angles(rotary)
    for giving in (rotary, copy.deepcopy(rotary)):
        turns = giving(x, position_ids=places)
        assert turns.scale == 1.25
        assert turns.angles.dtype == torch.float32
        for function, table in zip((torch.cos, torch.sin), exact, strict=True):
            torch.testing.assert_close(
                function(turns.angles) * turns.scale, table, rtol=0, atol=5e-7
            )
        return_cosines(giving)
        assert all(
            torch.equal(a, b) for a, b in zip(giving(x, position_ids=places), rounded, strict=True)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [None, 11, torch.tensor(11)], ids=["mean", "number", "tensor"])
@pytest.mark.parametrize("shifted", [False, True], ids=["", "shifted"])
def test_the_loss_is_that_of_float32_logits(dtype, count, shifted):
    logits = torch.randn(2, 9, 13, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 13, (2, 9))
    labels[0, 3:5] = -100
    following = F.pad(labels, (0, 1), value=-100)[:, 1:]
    expected = F.cross_entropy(
        logits.float().view(-1, 13),
        following.reshape(-1),
        reduction="mean" if count is None else "sum",
    )
    expected = expected if count is None else expected / 11
    options = {"labels": None, "shift_labels": following} if shifted else {"labels": labels}
    loss = causal_loss(logits, vocab_size=13, num_items_in_batch=count, **options)
    torch.testing.assert_close(loss, expected)
    before = logits.detach().clone()
    (grad,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(grad, torch.autograd.grad(expected, logits)[0])
    assert torch.equal(logits, before)


class Layer(nn.Module):
    """As transformers' decoder layers, which checkpoint themselves."""

    gradient_checkpointing = False

    def __init__(self) -> None:
        super().__init__()
        self.product = te.Linear(16, 16)
        self.runs: list[str] = []

    def __call__(self, x: Tensor) -> Tensor:
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(super().__call__, x)
        return super().__call__(x)

    def forward(self, x: Tensor) -> Tensor:
        self.runs.append(type(current().recipe).__name__ if current().enabled else "none")
        return self.product(x)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def outcome(decoder: Decoder, x: Tensor, steps: int = 3) -> list[Tensor]:
    """Outputs and gradients from several steps, in which delayed scales move."""
    results = []
    for step in range(steps):
        leaf = (x * (step + 1)).requires_grad_()
        y = decoder(leaf)
        y.square().sum().backward()
        results += [y.detach(), leaf.grad]
    return results


@pytest.mark.parametrize(
    "recipe", [DelayedScaling(), Float8CurrentScaling()], ids=["delayed", "current"]
)
def test_a_forward_runs_under_the_recipe_and_no_longer(recipe, device):
    decoder, x = Decoder().to(device), torch.randn(16, 16, device=device)
    with te.autocast(recipe=recipe):
        expected = decoder(x)
    decoder = Decoder().to(device)
    enter_recipe(decoder, recipe)
    assert torch.equal(decoder(x), expected)
    assert not current().enabled
    leave_recipe(decoder)
    decoder(x)
    assert decoder.layers[0].runs == [type(recipe).__name__, "none"]
    assert not (
        decoder._forward_hooks or decoder._forward_pre_hooks or decoder._forward_hooks_always_called
    )


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("recipe", [None, DelayedScaling()], ids=["high precision", "delayed"])
def test_torch_s_checkpoint_repeats_the_recipe(recipe, reentrant, device):
    x = torch.randn(16, 16, device=device)
    saved, repeated = Decoder().to(device), Decoder().to(device)
    for decoder in (saved, repeated):
        enter_recipe(decoder, recipe)
    for layer in repeated.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = functools.partial(
            torch_checkpoint, use_reentrant=reentrant
        )
    expected, actual = outcome(saved, x), outcome(repeated, x)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    name = "none" if recipe is None else "DelayedScaling"
    assert repeated.layers[0].runs == [name] * 6


def test_another_checkpoint_is_rejected_under_a_recipe(device):
    decoder, x = Decoder().to(device), torch.randn(16, 16, device=device)

    def offloading(function: Any, *args: Any) -> Any:
        return torch_checkpoint(function, *args, use_reentrant=False)

    for layer in decoder.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = functools.partial(offloading)
    enter_recipe(decoder, DelayedScaling())
    with pytest.raises(ValueError, match=r"offloading does not repeat a recipe"):
        decoder(x)
    assert not current().enabled
    decoder.eval()(x)


def test_a_forward_that_raises_updates_no_scale(device):
    decoder = Decoder().to(device)
    enter_recipe(decoder, DelayedScaling())
    decoder(torch.randn(16, 16, device=device))
    state = decoder.layers[0].product.fp8_meta["scaling_fwd"]
    before = state.scale.clone()
    decoder.layers[1].register_forward_hook(_interrupt)
    with pytest.raises(InterruptedError):
        decoder(1e3 * torch.randn(16, 16, device=device))
    assert torch.equal(state.scale, before)
    assert not current().enabled


def _interrupt(*call: Any) -> None:
    raise InterruptedError


def test_missing_transformers_are_named(monkeypatch):
    monkeypatch.setattr(
        optional, "failure", lambda *names: "importing transformers failed: not installed"
    )
    with pytest.raises(ImportError, match="pip install transformers"):
        te.convert_hf(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="is not converted"):
        te.revert_hf(nn.Linear(2, 2))
