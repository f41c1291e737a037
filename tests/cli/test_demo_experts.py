"""The demonstration with a mixture of experts: it trains under every recipe as in high precision, and draws text."""

from __future__ import annotations

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine_tools.demo.config import RECIPES, RunConfig, resolve
from transformer_engine_tools.demo.data import Corpus, load_corpus
from transformer_engine_tools.demo.experts import MixtureOfExperts
from transformer_engine_tools.demo.model import ByteGPT
from transformer_engine_tools.demo.run import Run
from transformer_engine_tools.demo.sample import generate

SIZES = {
    "steps": 12,
    "batch": 2,
    "sequence": 64,
    "layers": 1,
    "hidden": 128,
    "heads": 2,
    "experts": 4,
}
# Nats a byte, mean of the last four steps: the standard deviation over four seeds in high precision.
NOISE = 0.06


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    lines = [f"def function_{i}(x):\n    return x + {i}\n" for i in range(300)]
    (path := tmp_path_factory.mktemp("text") / "text.txt").write_text("\n".join(lines))
    return load_corpus(str(path), SIZES["sequence"])


def tiny(recipe: str = "delayed", **changes) -> RunConfig:
    return resolve("cpu", {**SIZES, "recipe": recipe, **changes})


@pytest.mark.parametrize("recipe", RECIPES[:-1])
@pytest.mark.sampled(2)
def test_the_loss_under_a_recipe_is_that_of_high_precision_within_noise(
    recipe: str, corpus: Corpus
):
    config, losses = tiny(recipe), {}
    with te.emulate():
        for name in config.runs:
            run = Run(name, config)
            losses[name] = [
                run.step(*corpus.batch(0, step, config.batch, config.sequence), 3e-3).item()
                for step in range(config.steps)
            ]
    assert all(selection[-1] < selection[0] - 1.0 for selection in losses.values())
    ours, high = (sum(losses[name][-4:]) / 4 for name in config.runs)
    assert 0 < abs(ours - high) < NOISE


def test_every_expert_and_the_router_get_gradients_and_the_loss_stays_that_of_the_text(
    corpus: Corpus,
):
    model = ByteGPT(tiny("none"))
    inputs, targets = map(torch.from_numpy, corpus.batch(0, 0, 4, 64))
    loss = model.loss(inputs, targets)
    with torch.no_grad():
        assert torch.equal(loss, model.loss(inputs, targets))
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert sum(p.grad.abs().sum() > 0 for n, p in model.named_parameters() if "fc1" in n) == 4
    assert model.layers[0].experts.router.weight.grad.abs().sum() > 0


def test_tokens_are_the_weighted_sums_of_their_experts():
    layer = MixtureOfExperts(tiny(), 0.02)
    x = torch.randn(3, 5, 128)
    tokens = layer.norm(x).flatten(0, 1)
    values, chosen = layer.router(tokens).topk(2)
    expected = torch.zeros_like(tokens)
    for index in range(2):
        for token, expert in enumerate(chosen[:, index].tolist()):
            gate, linear = (tokens[token] @ getattr(layer.fc1, f"weight{expert}").t()).chunk(2)
            y = (torch.nn.functional.silu(gate) * linear) @ getattr(
                layer.fc2, f"weight{expert}"
            ).t()
            expected[token] += values.softmax(1)[token, index] * y
    torch.testing.assert_close(layer(x).flatten(0, 1), expected, rtol=1e-5, atol=1e-6)


def test_the_cache_changes_no_byte():
    config = tiny()
    torch.manual_seed(0)
    model = ByteGPT(config)
    cached, full = (
        generate(model, config, b"def ", 12, temperature=0.0, cached=c) for c in (True, False)
    )
    assert cached == full


def test_one_expert_is_rejected():
    with pytest.raises(ValueError, match="--experts 1 must be 2 or more"):
        tiny(experts=1)
