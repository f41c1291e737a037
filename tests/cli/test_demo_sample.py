"""Sampling: the same text with and without the cache of keys and values, and from the same seed."""

from __future__ import annotations

import pytest
import torch

from transformer_engine_tools.demo.config import RunConfig, resolve
from transformer_engine_tools.demo.model import ByteGPT
from transformer_engine_tools.demo.sample import generate

PROMPT = b"def f(x):"


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return resolve("cpu", {"batch": 2, "sequence": 64, "layers": 2, "hidden": 64, "heads": 2})


@pytest.fixture(scope="module")
def model(config: RunConfig) -> ByteGPT:
    torch.manual_seed(0)
    model = ByteGPT(config)
    with torch.no_grad():  # weights large enough for one byte to stand out among 256
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(8)
    return model


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_cache_changes_no_byte(model: ByteGPT, config: RunConfig, temperature: float):
    cached = generate(model, config, PROMPT, 24, temperature=temperature)
    full = generate(model, config, PROMPT, 24, temperature=temperature, cached=False)
    assert len(cached) == 24
    assert cached == full
    assert len(set(cached)) > 1


def test_the_seed_decides_the_text(model: ByteGPT, config: RunConfig):
    first = generate(model, config, PROMPT, 16, temperature=2.0, seed=1)
    assert first == generate(model, config, PROMPT, 16, temperature=2.0, seed=1)
    assert first != generate(model, config, PROMPT, 16, temperature=2.0, seed=2)


def test_more_bytes_than_positions_are_rejected(model: ByteGPT, config: RunConfig):
    with pytest.raises(
        ValueError, match=r"9 \+ 60 bytes exceed the 64 positions .* ask for at most 55 bytes"
    ):
        generate(model, config, PROMPT, 60)


def test_an_empty_prompt_is_rejected(model: ByteGPT, config: RunConfig):
    with pytest.raises(ValueError, match=r"the prompt is empty"):
        generate(model, config, b"", 4)
