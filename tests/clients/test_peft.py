"""Unmodified peft adapts this package's layers: it trains with frozen weights, quantized ones too, saves and loads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import transformer_engine.pytorch as te
from tests.clients import installed
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

pytestmark = [*installed.needs("peft", "transformers"), installed.EMULATED]

FEATURES = 64
LAYERS = {
    "Linear": lambda **how: te.Linear(FEATURES, FEATURES, **how),
    "LayerNormLinear": lambda **how: te.LayerNormLinear(FEATURES, FEATURES, **how),
    "LayerNormMLP": lambda **how: te.LayerNormMLP(FEATURES, 2 * FEATURES, **how),
}
QUANTIZED = {"high precision": None, "delayed": DelayedScaling(), "current": Float8CurrentScaling()}


class Network(nn.Module):
    def __init__(self, kind: str, **how: Any):
        super().__init__()
        torch.manual_seed(0)
        self.layer = LAYERS[kind](**how)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def create_adapted_network(kind: str, recipe: Any = None) -> Any:
    """A network with an adapter around its only layer, whose weights are quantized under a recipe."""
    import peft

    with te.quantized_model_init(enabled=recipe is not None, recipe=recipe):
        network = Network(kind)
    torch.manual_seed(1)
    return peft.get_peft_model(network, peft.LoraConfig(r=8, target_modules=["layer"]))


def example() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(32, FEATURES, generator=generator)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return x.to(device), (x @ torch.randn(FEATURES, FEATURES, generator=generator) / 8).to(device)


def train_adapter(model: Any, recipe: Any, steps: int = 30) -> list[float]:
    x, y = example()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def step() -> Tensor:
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return installed.losses(step, steps)


def values(parameter: Tensor) -> Tensor:
    return (
        (parameter.dequantize() if isinstance(parameter, te.QuantizedTensor) else parameter)
        .detach()
        .clone()
    )


@pytest.mark.parametrize("recipe", QUANTIZED.values(), ids=QUANTIZED)
@pytest.mark.parametrize("kind", LAYERS)
def test_an_adapter_trains_on_a_frozen_layer(kind, recipe):
    model = create_adapted_network(kind, recipe)
    base = {name: values(p) for name, p in model.named_parameters() if not p.requires_grad}
    assert len(base) >= 2
    assert any(isinstance(p, te.QuantizedTensor) for p in model.parameters()) == (
        recipe is not None
    )
    installed.assert_falls(train_adapter(model, recipe))
    for name, parameter in model.named_parameters():
        if name in base:
            assert parameter.grad is None
            assert torch.equal(values(parameter), base[name]), name
        else:
            assert "lora_" in name


@pytest.mark.parametrize("kind", LAYERS)
def test_the_frozen_layer_computes_no_weight_gradient(kind):
    """Output and input gradient equal the layer's own plus the adapter's product."""
    model = create_adapted_network(kind)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    x, _ = example()
    x.requires_grad_()
    tuned = model.base_model.model.layer
    a, b = tuned.lora_A["default"].weight, tuned.lora_B["default"].weight
    expected = tuned.base_layer(x) + x @ a.t() @ b.t() * tuned.scaling["default"]
    torch.testing.assert_close(model(x), expected)
    (grad,) = torch.autograd.grad(model(x).square().sum(), x)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.square().sum(), x)[0])


@pytest.mark.parametrize("recipe", QUANTIZED.values(), ids=QUANTIZED)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_saved_adapter_loads_with_equal_outputs(kind, recipe, tmp_path):
    import peft

    model = create_adapted_network(kind, recipe)
    train_adapter(model, recipe, steps=3)
    model.save_pretrained(tmp_path)
    with te.quantized_model_init(enabled=recipe is not None, recipe=recipe):
        network = Network(kind)
    loaded = peft.PeftModel.from_pretrained(network, tmp_path)
    x, _ = example()
    assert torch.equal(loaded.eval()(x), model.eval()(x))


@pytest.mark.parametrize("kind", LAYERS)
def test_merging_is_rejected_by_peft_itself(kind):
    with pytest.raises(NotImplementedError, match="does not support merge"):
        create_adapted_network(kind).merge_and_unload()


@pytest.mark.parametrize("recipe", [None, DelayedScaling()], ids=["high precision", "delayed"])
def test_a_converted_llama_is_adapted(recipe, tmp_path):
    import peft

    def model() -> Any:
        model = te.convert_hf(installed.tiny_llama(), recipe=recipe)
        return model.cuda() if torch.cuda.is_available() else model

    def tune(model: Any) -> Any:
        torch.manual_seed(3)
        return peft.get_peft_model(
            model,
            peft.LoraConfig(
                r=8, target_modules=["layernorm_qkv", "o_proj", "mlp"], task_type="CAUSAL_LM"
            ),
        )

    llama = tune(model())
    tokens = installed.tokens(llama.device)
    optimizer = torch.optim.AdamW([p for p in llama.parameters() if p.requires_grad], lr=1e-2)

    def step() -> Tensor:
        loss = llama(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    installed.assert_falls(installed.losses(step, 8), least=0.2)  # the head is frozen
    llama.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(model(), tmp_path)
    assert loaded.peft_config["default"].target_modules == {"layernorm_qkv", "o_proj", "mlp"}
    ours, reference = (
        {name: value for name, value in m.state_dict().items() if "lora_" in name}
        for m in (llama, loaded)
    )
    assert set(ours) == set(reference)
    assert all(torch.equal(ours[name], reference[name]) for name in ours)
    with pytest.raises(ValueError, match="adapters of peft"):
        te.revert_hf(llama)


def test_adapters_come_after_the_conversion():
    import peft

    config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="convert the model first"):
        te.convert_hf(peft.get_peft_model(installed.tiny_llama(), config))
    with pytest.raises(ValueError, match="not found in the base model"):
        peft.get_peft_model(te.convert_hf(installed.tiny_llama()), config)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", LAYERS)
def test_an_adapter_trains_on_quantized_weights_on_a_gpu(kind):
    recipe = Float8CurrentScaling()
    model = create_adapted_network(kind, recipe).cuda()
    base = [p for p in model.parameters() if isinstance(p, te.QuantizedTensor)]
    assert base
    assert all(p.is_cuda for p in base)
    installed.assert_falls(train_adapter(model, recipe))
