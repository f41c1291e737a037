"""Which published clients are installed, and the model that several of their tests train."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

VOCABULARY = 96
EMULATED = pytest.mark.usefixtures("emulated")  # conftest.py


def needs(*clients: str) -> list[pytest.MarkDecorator]:
    """Pytest marks for a file whose tests run these packages."""
    absent = [name for name in clients if importlib.util.find_spec(name) is None]
    reason = f"{', '.join(absent)} is not installed; `make test-clients` installs it"
    return [
        pytest.mark.clients,
        pytest.mark.skipif(bool(absent), reason=reason),
    ]


def tiny_llama(**settings: Any) -> Any:
    """A seeded two-layer Llama; every dimension supports FP8."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    small = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**small, **settings}))


def tokens(device: Any = "cpu", batch: int = 2, length: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (batch, length), generator=generator).to(device)


def losses(step: Callable[[], Tensor], steps: int) -> list[float]:
    """Call a step repeatedly and return its losses."""
    return [step().item() for _ in range(steps)]


def assert_falls(values: list[float], least: float = 0.3) -> None:
    first, last = values[0], values[-1]
    assert last < first - least, values
